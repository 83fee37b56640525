// Data, text and elements. All text enters the page through textContent, never as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const STEPS = 9;
const SHADES = 8;
const STRIP = 120;
const state = { role: 0, head: null, kind: "high", tables: {} };

const byId = (id) => document.getElementById(id);

function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

function svg(tag, props = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(props)) node.setAttribute(name, String(value));
  node.append(...children);
  return node;
}

const label = (head) => `L${data.heads[head][0]}H${data.heads[head][1]}`;
const headsByLabel = new Map(data.heads.map((_, head) => [label(head), head]));
const minus = (text) => text.replaceAll("-", "−");
const known = (value) => value !== null && value !== undefined;

function number(role, value) {
  return known(value) ? minus(value.toFixed(role.decimals)) : "–";
}

function small(value) {
  if (!known(value)) return "–";
  return value === 0 || value >= 0.001 ? value.toFixed(3) : minus(value.toExponential(1));
}

function interval(role, head) {
  const [low, high] = [role.low[head], role.high[head]];
  return known(low) && known(high) ? `${number(role, low)} to ${number(role, high)}` : "–";
}

function step(role, effect) {
  const share = Math.round((STEPS * effect) / role.scale);
  return Math.max(-STEPS, Math.min(STEPS, share));
}

function cellClass(role, head) {
  const effect = role.effect[head];
  if (!known(effect)) return "na";
  const k = step(role, effect);
  return k === 0 ? "z" : `${k > 0 ? "p" : "n"}${Math.abs(k)}`;
}

// Score, interval and null of one head on its role's axis.
function strip(role, head) {
  if (!known(role.score[head])) return null;
  const [low, high] = role.axis;
  const place = (value) => 4 + (STRIP - 8) * Math.min(1, Math.max(0, (value - low) / (high - low)));
  const parts = [svg("path", { class: "axis", d: `M4 7H${STRIP - 4}` })];
  if (known(role.null[head])) {
    parts.push(svg("path", { class: "null", d: `M${place(role.null[head])} 2v10` }));
  }
  if (known(role.low[head]) && known(role.high[head])) {
    const d = `M${place(role.low[head])} 7H${place(role.high[head])}`;
    parts.push(svg("path", { class: "interval", d }));
  }
  parts.push(svg("circle", { class: "dot", cx: place(role.score[head]), cy: 7, r: 3.5 }));
  return svg("svg", { class: "strip", width: STRIP, height: 14, "aria-hidden": "true" }, ...parts);
}

const tip = byId("tip");

// Beside what it is about, or under it where what follows must stay readable.
function showTip(anchor, under, ...content) {
  tip.replaceChildren(...content);
  tip.hidden = false;
  const at = anchor.getBoundingClientRect();
  const box = tip.getBoundingClientRect();
  const right = at.right + 10 + box.width < innerWidth;
  const left = right ? at.right + 10 : at.left - 10 - box.width;
  const fits = left > 4 && !under;
  const x = fits ? left : Math.min(Math.max(8, at.left), innerWidth - box.width - 8);
  const below = at.bottom + 10;
  const y = fits ? at.top - 8 : below + box.height < innerHeight ? below : at.top - 10 - box.height;
  tip.style.left = `${Math.max(4, x)}px`;
  tip.style.top = `${Math.max(4, Math.min(y, innerHeight - box.height - 8))}px`;
}

function hideTip() {
  tip.hidden = true;
}

function pairs(entries) {
  return el("dl", {}, entries.flatMap(([term, text]) => [el("dt", {}, term), el("dd", {}, text)]));
}
