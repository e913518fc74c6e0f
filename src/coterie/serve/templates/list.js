(() => {
  const list = document.getElementById("list"), box = document.getElementById("q"), form = document.getElementById("choose");
  const said = document.getElementById("chosen"), chosen = new Set(), PAUSE = 3000, TYPING = 150;
  let asked = 0, timer = 0;
  const boxes = () => list.querySelectorAll("input[name=run]");
  function tick() {
    boxes().forEach((one) => { one.checked = chosen.has(one.value); });
    said.textContent = chosen.size ? `${chosen.size} chosen` : "";
  }
  const field = (name, page = document) => page.querySelector(`[role=search] [name=${name}]`);
  // The address says what was asked for, so that it can be kept and gone back to, and refreshing asks for the same.
  function ask(words) {
    clearTimeout(timer);
    for (const name of ["sort", "order"]) field(name).value = words.get(name) ?? "";
    history.replaceState(null, "", `/?${words}`);
    refresh();
  }
  const refresh = () => show(location.pathname + location.search).catch(() => {});
  async function show(address) {
    const mine = ++asked;
    const answer = await fetch(address);
    if (!answer.ok || mine !== asked) return;
    const other = parsed(await answer.text());
    if (mine !== asked) return;
    morph(list, other.getElementById("list"));
    for (const name of ["sort", "order"]) field(name).value = field(name, other).value;
    tick();
  }
  const filter = () => ask(new URLSearchParams(new FormData(box.form)));
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
    const words = new URLSearchParams(link.search);
    if ((words.get("q") ?? "") !== box.value) { // typed since the link was made
      words.set("q", box.value);
      words.delete("page");
    }
    ask(words);
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
  setInterval(() => document.hidden || refresh(), PAUSE);
})();
