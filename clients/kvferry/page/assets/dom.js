// Elements without markup: every value from the daemon becomes text.

const SVG = "http://www.w3.org/2000/svg";

function filled(element, children) {
  for (const child of children.flat())
    if (child !== null && child !== undefined) element.append(child instanceof Node ? child : String(child));
  return element;
}

// about: properties of the element, `class` for its classes.
export function make(tag, about, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(about ?? {})) element[name === "class" ? "className" : name] = value;
  return filled(element, children);
}

export function svg(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes ?? {})) element.setAttribute(name, value);
  return filled(element, children);
}

export const at = (id) => document.getElementById(id);

export function say(id, text) {
  const element = at(id);
  if (element.textContent !== text) element.textContent = text;
}

const TONES = {
  done: "good", released: "good", failed: "bad", revoked: "bad", aborted: "wait", expired: "wait", publishing: "go",
  published: "go", connecting: "go", reading: "go", verifying: "go",
};
export const chip = (text, tone = TONES[text] ?? "") => make("span", { class: `chip ${tone}` }, text);

// A definition list's entries; those without a value are left out.
export function entries(pairs) {
  return pairs.filter(([, value]) => value !== "" && value !== null && value !== undefined)
    .map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)));
}

const LOOPBACK = /^(localhost$|127\.|\[::1\]$)/;

// A link to the page of another daemon, at the URL that it gives of itself; its text alone where that is none, or where
// only a browser on the daemon's own host reaches it and this is another.
export function pageOf(url, text, fragment = "") {
  const page = URL.canParse(url ?? "") ? new URL(url) : null;
  const elsewhere = page && LOOPBACK.test(page.hostname) && !LOOPBACK.test(location.hostname);
  if (!page || elsewhere || !/^https?:$/.test(page.protocol)) return make("span", {}, text);
  return make("a", { href: `${page.origin}/${fragment}`, rel: "noreferrer", target: "_blank" }, text);
}

// Fill `parent` with one element per item. An element stays as long as its item's key does, and is drawn again when
// its item says something else: what has focus keeps it, and what has not changed costs nothing.
export function keyed(parent, items, key, create, draw) {
  const before = parent.kept ?? new Map(), now = new Map();
  let next = parent.firstElementChild;
  for (const item of items) {
    const name = key(item), element = before.get(name) ?? create(item), said = JSON.stringify(item);
    element.item = item;
    if (element.said !== said) draw(element, item);
    element.said = said;
    now.set(name, element);
    if (element === next) next = next.nextElementSibling;
    else parent.insertBefore(element, next);
  }
  for (const [name, element] of before) if (!now.has(name)) element.remove();
  parent.kept = now;
}
