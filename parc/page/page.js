"use strict";
(() => {
  const root = document.documentElement, theme = document.getElementById("theme");
  const remember = (...pair) => { try { return pair.length > 1 ? localStorage.setItem(...pair) : localStorage.getItem(...pair); } catch { return null; } };
  const set = (name) => { if (name) root.dataset.theme = name; else delete root.dataset.theme; };
  const names = [null, "light", "dark"];
  set(remember("parc-theme") || null);
  for (const one of document.querySelectorAll("[data-script]")) one.hidden = false;
  const label = () => { theme.lastElementChild.textContent = root.dataset.theme || "system"; };
  theme.addEventListener("click", () => {
    const next = names[(names.indexOf(root.dataset.theme || null) + 1) % names.length];
    set(next);
    remember("parc-theme", next || "");
    label();
  });
  label();

  const filter = document.getElementById("filter"), rows = [...document.querySelectorAll(".row")];
  filter.addEventListener("input", () => {
    const wanted = filter.value.trim().toLowerCase();
    for (const row of rows) row.classList.toggle("off", !row.dataset.name.toLowerCase().includes(wanted));
  });
  const full = document.getElementById("full");
  if (full) full.addEventListener("click", () => {
    full.textContent = document.querySelector(".timeline").classList.toggle("full") ? "fit" : "full size";
  });
  const paths = [...document.querySelectorAll(".arcs path")];
  const light = (row) => { for (const path of paths) path.classList.toggle("on", row !== null && path.dataset.e.split(" ").includes(row.dataset.at)); };
  for (const row of rows) {
    row.addEventListener("mouseenter", () => light(row));
    row.addEventListener("mouseleave", () => light(null));
    row.addEventListener("focusin", () => light(row));
  }
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && document.activeElement) document.activeElement.blur();
  });

  const open = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    let closed = false;
    for (let at = target; at; at = at.parentElement) if (at.tagName === "DETAILS" && !at.open) { at.open = true; closed = true; }
    if (closed) target.scrollIntoView();
    if (target.classList.contains("row")) target.focus({ preventScroll: true });
  };
  addEventListener("hashchange", open);

  const linked = (behind) => {
    const [before, number, after] = behind.textContent.split(/plan:(\d+)/);
    const line = number && document.querySelector(`.plan li[data-line="${number}"]`);
    if (line) behind.replaceChildren(before, Object.assign(document.createElement("a"), { href: `#${line.id}`, textContent: `plan:${number}` }), after);
  };
  for (const one of document.querySelectorAll(".program")) one.addEventListener("toggle", () => one.querySelectorAll("s").forEach(linked), { once: true });

  const say = (text) => {
    const note = Object.assign(document.createElement("div"), { className: "said", textContent: text });
    document.body.append(note);
    setTimeout(() => note.remove(), 1500);
  };
  document.querySelector("main").addEventListener("click", (event) => {
    const line = event.target.closest("pre i");
    if (!line || event.target.closest("a") || String(getSelection())) return;
    history.replaceState(null, "", `#${line.id}`);
    if (navigator.clipboard) navigator.clipboard.writeText(location.href).then(() => say("link copied"), () => {});
  });
  open();
  let opened = [];
  addEventListener("beforeprint", () => { opened = [...document.querySelectorAll("details:not([open], .program)")]; for (const one of opened) one.open = true; });
  addEventListener("afterprint", () => { for (const one of opened) one.open = false; });
})();
