(() => {
  const live = document.getElementById("live"), said = document.getElementById("said"), address = live.dataset.address;
  const status = () => live.querySelector("[data-status]")?.dataset.status;
  let seen = live.dataset.seen, source = null, busy = false, again = false;
  async function load() {
    again = busy;
    if (busy) return;
    busy = true;
    try {
      const answer = await fetch(`${address}/body`), before = status();
      if (answer.ok) {
        const shell = live.cloneNode(false);
        shell.append(...parsed(await answer.text()).body.childNodes);
        morph(live, shell);
        if (status() !== before) said.textContent = `The run is ${status()}.`;
      }
    } finally {
      busy = false;
      if (again) load();
    }
  }
  // Only while it is looked at: a browser has few connections to one server, and all tabs share them.
  function follow() {
    source?.close();
    source = null;
    if (document.hidden) return;
    source = new EventSource(`${address}/events?seen=${encodeURIComponent(seen)}`);
    source.onmessage = (event) => {
      seen = event.data;
      load().catch(() => { said.textContent = "The server does not answer."; });
    };
  }
  document.addEventListener("visibilitychange", follow);
  addEventListener("pagehide", () => source?.close());
  follow();
})();
