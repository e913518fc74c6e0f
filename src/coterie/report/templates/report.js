"use strict";
(() => {
  const DRAWN = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-size", "font-family", "font-weight", "text-anchor"];
  // A copy that looks the same elsewhere: the style of the page is written into every element.
  function standalone(svg) {
    const copy = svg.cloneNode(true), box = svg.viewBox.baseVal;
    const from = [svg, ...svg.querySelectorAll("*")], to = [copy, ...copy.querySelectorAll("*")];
    from.forEach((element, i) => {
      const style = getComputedStyle(element);
      to[i].setAttribute("style", DRAWN.map((name) => `${name}:${style.getPropertyValue(name)}`).join(";"));
    });
    copy.setAttribute("width", box.width);
    copy.setAttribute("height", box.height);
    const paper = document.createElementNS(svg.namespaceURI, "rect");
    for (const [name, value] of Object.entries({ width: "100%", height: "100%", fill: getComputedStyle(document.documentElement).getPropertyValue("--card") })) paper.setAttribute(name, value);
    copy.prepend(paper);
    return new XMLSerializer().serializeToString(copy);
  }
  function download(name, url) {
    const link = document.createElement("a");
    link.download = name;
    link.href = url;
    link.click();
  }
  function save(figure, kind) {
    figure.querySelectorAll(".plot svg").forEach((svg, i, all) => {
      const name = figure.dataset.name + (all.length > 1 ? `-${i + 1}` : ""), text = standalone(svg);
      const source = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(text);
      if (kind === "svg") return download(`${name}.svg`, source);
      const image = new Image();
      image.onload = () => {
        const canvas = document.createElement("canvas");
        canvas.width = image.width * 3;
        canvas.height = image.height * 3;
        canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
        download(`${name}.png`, canvas.toDataURL("image/png"));
      };
      image.src = source;
    });
  }
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-save]");
    if (button) return save(button.closest("figure"), button.dataset.save);
    const node = event.target.closest("svg a[data-node]");
    if (!node) return;
    event.preventDefault();
    node.closest("figure").querySelectorAll("[data-node]").forEach((element) => element.classList.toggle("chosen", element.dataset.node === node.dataset.node));
  });
})();
