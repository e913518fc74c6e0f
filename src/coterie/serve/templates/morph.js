
// Makes an element like another one. What is the same stays the same element: the focus, the scroll position, what is
// open and what was typed are kept. The other one comes from an inert document, so nothing in it is ever run.
function morph(old, other) {
  const like = (a, b) => a.nodeType === b.nodeType && a.nodeName === b.nodeName;
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.data !== other.data) old.data = other.data;
    return;
  }
  const kept = (name) => name === "open" || (name === "class" && old.hasAttribute("data-node"));
  for (const { name } of [...old.attributes]) if (!kept(name) && !other.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of other.attributes) if (!kept(name) && old.getAttribute(name) !== value) old.setAttribute(name, value);
  const now = [...old.childNodes], next = [...other.childNodes];
  next.forEach((node, i) => {
    if (i >= now.length) old.append(document.importNode(node, true));
    else if (like(now[i], node)) morph(now[i], node);
    else now[i].replaceWith(document.importNode(node, true));
  });
  now.slice(next.length).forEach((node) => node.remove());
}
function parsed(html) {
  return new DOMParser().parseFromString(html, "text/html");
}
