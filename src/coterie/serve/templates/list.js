(() => {
  const list = document.getElementById("list"), box = document.getElementById("q"), form = document.getElementById("choose");
  const said = document.getElementById("chosen"), chosen = new Set(), PAUSE = 3000, TYPING = 150;
  let asked = 0, timer = 0;
  const boxes = () => list.querySelectorAll("input[name=run]");
  function tick() {
    boxes().forEach((one) => { one.checked = chosen.has(one.value); });
    said.textContent = chosen.size ? `${chosen.size} chosen` : "";
  }
  // The address says what is shown, so that it can be kept and gone back to.
  async function show(address, remember) {
    const mine = ++asked;
    const answer = await fetch(address);
    if (!answer.ok || mine !== asked) return;
    const other = parsed(await answer.text());
    if (mine !== asked) return;
    morph(list, other.getElementById("list"));
    for (const name of ["sort", "order"]) document.querySelector(`[role=search] [name=${name}]`).value = other.querySelector(`[role=search] [name=${name}]`).value;
    tick();
    if (remember) history.replaceState(null, "", address);
  }
  function filter() {
    const words = new URLSearchParams(new FormData(box.form));
    show(`/?${words}`, true).catch(() => {});
  }
  box.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(filter, TYPING);
  });
  box.form.addEventListener("submit", (event) => {
    event.preventDefault();
    filter();
  });
  list.addEventListener("click", (event) => {
    const link = event.target.closest("th a, .pages a");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    show(link.getAttribute("href"), true).catch(() => {});
  });
  list.addEventListener("change", (event) => {
    const one = event.target;
    if (one.name === "run") chosen[one.checked ? "add" : "delete"](one.value);
    tick();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!chosen.size) said.textContent = "Choose runs first, by the boxes before their names.";
    else location.assign(`/compare?${new URLSearchParams([...chosen].map((name) => ["run", name]))}`);
  });
  boxes().forEach((one) => one.checked && chosen.add(one.value));
  tick();
  setInterval(() => document.hidden || show(location.pathname + location.search, false).catch(() => {}), PAUSE);
})();
