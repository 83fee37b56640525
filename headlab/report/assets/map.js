// The large map: one grid cell per head, recoloured when the role changes.
const grid = byId("map");
const cells = new Array(data.heads.length);
const layers = [...new Set(data.heads.map(([layer]) => layer))];
const width = Math.max(data.nHeads, ...data.heads.map(([, head]) => head + 1));
const group = data.nKvHeads > 0 && data.nKvHeads < data.nHeads ? data.nHeads / data.nKvHeads : 0;
const grouped = Number.isInteger(group) && group > 1;
const mixedStacks = new Set(data.stacks).size > 1;

// Column of a head: groups that share a key/value head are set apart by a narrow spacer column.
const column = (head) => 2 + head + (grouped ? Math.floor(head / group) : 0);

function cellSize() {
  const fit = Math.min(560 / width, 720 / layers.length);
  return Math.max(15, Math.min(26, Math.floor(fit) - 2));
}

function place(node, row, from, span = 1) {
  node.style.gridRow = String(row);
  node.style.gridColumn = span === 1 ? String(from) : `${from} / span ${span}`;
  return node;
}

function buildMap() {
  const size = cellSize();
  const columns = ["auto"];
  for (let head = 0; head < width; head += 1) {
    if (grouped && head > 0 && head % group === 0) columns.push("4px");
    columns.push(`${size}px`);
  }
  grid.style.setProperty("--cell", `${size}px`);
  grid.style.gridTemplateColumns = columns.join(" ");
  const first = grouped ? 2 : 1;
  if (grouped) {
    for (let head = 0; head < width; head += group) {
      const kv = head / group;
      const mark = el("span", { class: "kv", title: `key/value head ${kv}`, "aria-hidden": "true" });
      grid.append(place(mark, 1, column(head), Math.min(group, width - head)));
    }
  }
  const every = size >= 22 ? 1 : 4;
  const header = el("div", { role: "row" });
  header.append(place(el("span", { role: "columnheader", "aria-label": "layer" }), first, 1));
  for (let head = 0; head < width; head += 1) {
    const text = head % every === 0 ? `H${head}` : "";
    const props = { class: "col", role: "columnheader", "aria-label": `head ${head}` };
    header.append(place(el("span", props, text), first, column(head)));
  }
  grid.append(header);
  layers.forEach((layer, y) => grid.append(layerRow(layer, first + 1 + y)));
  grid.addEventListener("keydown", moveFocus);
  grid.addEventListener("click", (event) => {
    const head = headOf(event.target);
    if (head !== null) select({ head, reveal: true });
  });
  grid.addEventListener("pointerover", (event) => pointAt(event.target));
  grid.addEventListener("focusin", (event) => pointAt(event.target));
  grid.addEventListener("pointerleave", hideTip);
  grid.addEventListener("focusout", hideTip);
}

function layerRow(layer, row) {
  const line = el("div", { role: "row" });
  const window_ = data.windows[layer];
  const stack = mixedStacks ? data.stacks[layer] : null;
  const title = known(window_) ? `layer ${layer}, sliding window of ${window_} tokens` : `layer ${layer}`;
  const props = {
    class: known(window_) ? "row-label window" : "row-label",
    role: "rowheader",
    title,
    "aria-label": stack ? `${title}, ${stack}` : title,
  };
  const name = el("span", props, stack ? el("span", { class: "stack" }, stack) : null, `L${layer}`);
  line.append(place(name, row, 1));
  data.heads.forEach(([at, head], index) => {
    if (at !== layer) return;
    const cell = el("div", { role: "gridcell", tabindex: -1, "data-head": index });
    cells[index] = cell;
    line.append(place(cell, row, column(head)));
  });
  return line;
}

function headOf(node) {
  const cell = node.closest?.("[data-head]");
  return cell && grid.contains(cell) ? Number(cell.dataset.head) : null;
}

function pointAt(node) {
  const head = headOf(node);
  if (head === null) return hideTip();
  showTip(cells[head], false, ...facts(data.roles[state.role], head));
}

function facts(role, head) {
  const note = known(role.note[head]) ? data.notes[role.note[head]] : "";
  const title = el("div", {}, el("b", {}, label(head)), ` ${role.title}`);
  const about = note ? el("p", { class: "tip-note" }, note) : null;
  if (!known(role.score[head])) {
    return [title, el("p", { class: "tip-note" }, note || "not measurable")];
  }
  const entries = [
    ["score", number(role, role.score[head])],
    ["95% interval", interval(role, head)],
    ["null mean", number(role, role.null[head])],
    ["effect", number(role, role.effect[head])],
    ["p", small(role.p[head])],
    ["q", small(role.q[head])],
    ["n", role.n[head].toLocaleString("en")],
  ];
  const verdict = role.claimed[head] ? el("span", { class: "is-mark" }, "claimed") : "not claimed";
  return [title, pairs([...entries, ["", verdict]]), about].filter(Boolean);
}

function paintMap() {
  const role = data.roles[state.role];
  cells.forEach((cell, head) => {
    const claimed = role.claimed[head] === 1;
    cell.className = `cell ${cellClass(role, head)}${claimed ? " claimed" : ""}`;
    const effect = known(role.effect[head]) ? `effect ${number(role, role.effect[head])}` : "not measurable";
    cell.setAttribute("aria-label", `${label(head)}, ${effect}${claimed ? ", claimed" : ""}`);
  });
  paintLegend(role);
}

function paintSelection() {
  cells.forEach((cell, head) => {
    const on = head === state.head;
    cell.setAttribute("aria-selected", String(on));
    cell.tabIndex = on || (state.head === null && head === 0) ? 0 : -1;
  });
}

function paintLegend(role) {
  const used = role.effect.filter(known).map((effect) => step(role, effect));
  const low = Math.min(0, ...used);
  const ramp = el("div", { class: "ramp", "aria-hidden": "true" });
  for (let k = low; k <= STEPS; k += 1) {
    ramp.append(el("span", { class: k === 0 ? "z" : `${k > 0 ? "p" : "n"}${Math.abs(k)}` }));
  }
  const ends = [(low * role.scale) / STEPS, role.scale].map((value) => number(role, value));
  const text = el("div", { class: "ramp-text" }, el("span", {}, ends[0]),
    el("span", {}, "effect: score over null"), el("span", {}, ends[1]));
  const keys = el("div", { class: "keys" }, key("claimed", "claimed"));
  if (role.effect.some((effect) => !known(effect))) keys.append(key("na", "not measurable"));
  if (grouped) keys.append(key("bracket", `${group} heads share a key/value head`));
  if (data.windows.some(known)) keys.append(key("dotted", "sliding window"));
  byId("legend").replaceChildren(el("div", {}, ramp, text), keys);
}

function key(kind, text) {
  return el("span", {}, el("span", { class: `swatch ${kind}` }), text);
}

function moveFocus(event) {
  const head = headOf(event.target);
  if (head === null) return;
  if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    select({ head, reveal: true });
    return;
  }
  const [layer, at] = data.heads[head];
  const inLayer = data.heads.filter(([other]) => other === layer);
  const y = layers.indexOf(layer);
  const targets = {
    ArrowLeft: [layer, at - 1],
    ArrowRight: [layer, at + 1],
    ArrowUp: [layers[y - 1], at],
    ArrowDown: [layers[y + 1], at],
    Home: inLayer[0],
    End: inLayer[inLayer.length - 1],
  };
  if (!(event.key in targets)) return;
  event.preventDefault();
  const next = headsByLabel.get(`L${targets[event.key][0]}H${targets[event.key][1]}`);
  if (next === undefined) return;
  cells[head].tabIndex = -1;
  cells[next].tabIndex = 0;
  cells[next].focus();
}
