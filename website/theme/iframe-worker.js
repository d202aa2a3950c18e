// Browsers start no workers for pages that are opened from a folder: there, the search runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(address) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => this.onmessage?.({ data });
      const script = inside.document.createElement("script");
      script.src = new URL(address, location.href);
      this.ready = new Promise((resolve) => script.addEventListener("load", resolve));
      inside.document.body.append(script);
    }
    postMessage(data) {
      const inside = this.frame.contentWindow;
      this.ready.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
