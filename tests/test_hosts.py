"""Two hosts in two network namespaces: by the documented commands they train, save, are stopped by a signal and go on,
with the losses of one launcher, while a stranger sends messages to every port. ``make hosts`` does it many times."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts import Lab, attack, documented, go_on
from tests.network import HOSTS, NoNetwork, network


def test_the_commands_of_the_docs_name_a_host_and_a_checkpoint() -> None:
    words, resume = documented()
    assert words[:2] == ["run", "build/big"] and "--save" in words and "host0:29500" in words
    assert resume == ["--resume", "checkpoint"]


def test_two_hosts_train_under_attack_and_go_on_as_one_launcher_does(tmp_path: Path) -> None:
    try:
        with network(tmp_path) as hosts:
            lab = Lab(tmp_path, hosts, forked=True)
            outcome = attack(lab, 0, 100)
            assert not outcome.wrong and outcome.codes.keys() == HOSTS.keys(), outcome
            assert f"{HOSTS['host0']}:29500" in outcome.sent and outcome.heard, outcome
            if set(outcome.codes.values()) == {143}:
                assert not (wrong := go_on(lab, outcome.metrics, 2)), wrong
    except NoNetwork as reason:
        pytest.skip(f"no two hosts can be made here: {reason}")
