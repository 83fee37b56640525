// The card of one head: every role's evidence, and rows of attention to look at.
const KINDS = ["high", "median", "random"];
const examplesOf = (head) => data.examples.filter((example) => example.head === head);

function paintCard() {
  const head = state.head;
  const card = byId("card");
  if (head === null) {
    card.replaceChildren(el("p", { class: "muted" }, "Select a head on the map."));
    return;
  }
  const [layer, at] = data.heads[head];
  const about = [`layer ${layer}`, `head ${at}`];
  if (grouped) about.push(`key/value head ${Math.floor(at / group)} of ${data.nKvHeads}`);
  if (mixedStacks) about.push(data.stacks[layer]);
  if (known(data.windows[layer])) about.push(`sliding window of ${data.windows[layer].toLocaleString("en")}`);
  card.replaceChildren(
    el("h3", {}, label(head)),
    el("p", { class: "card-facts" }, about.join(" · ")),
    rolesOf(head),
    ...causalOf(head),
    ...detailsOf(head),
    ...examplePart(head),
  );
}

function rolesOf(head) {
  const order = data.roles.map((_, index) => index);
  const strength = (role) => (known(role.effect[head]) ? role.effect[head] / role.scale : -Infinity);
  order.sort((a, b) => {
    const [one, two] = [data.roles[a], data.roles[b]];
    return two.claimed[head] - one.claimed[head] || strength(two) - strength(one) || a - b;
  });
  const rows = order.map((index) => {
    const role = data.roles[index];
    const classes = [index === state.role ? "current" : "", role.claimed[head] ? "is-claimed" : ""];
    const pick = el("button", { class: "link", type: "button", onclick: () => select({ role: index }) }, role.title);
    return el("tr", { class: classes.join(" ").trim() },
      el("th", { scope: "row" }, pick),
      el("td", {}, strip(role, head) ?? "not measurable"),
      el("td", { class: "num" }, number(role, role.score[head])),
      el("td", { class: "num" }, small(role.q[head])),
      el("td", { class: "is-mark" }, role.claimed[head] ? "claimed" : ""));
  });
  const titles = [["Role"], ["Score against null"], ["Score", "num"], ["q", "num"], [""]];
  const header = titles.map(([text, kind]) => el("th", { scope: "col", class: kind ?? null }, text));
  return el("div", { class: "table-scroll" },
    el("table", { class: "card-roles" }, el("thead", {}, el("tr", {}, header)), el("tbody", {}, rows)));
}

function causalOf(head) {
  return data.causal
    .filter((row) => row.heads.split(/[,\s]+/).includes(label(head)))
    .map((row) => {
      const with_ = row.heads === label(head) ? "Ablating it" : `Ablating ${row.heads}`;
      const text = (value) => (known(value) ? minus(String(Number(value.toPrecision(3)))) : "–");
      return el("p", { class: "causal" },
        `${with_} changes ${row.metric} by ${text(row.effect)}; matched random heads by ${text(row.control)}. `,
        el("b", {}, row.confirmed ? "Confirmed." : "Not beyond random heads."));
    });
}

// Numbers in a list, profiles as small plots; those of the layer come last.
function detailsOf(head) {
  const [layer] = data.heads[head];
  const mine = data.details.filter((detail) => detail.role === state.role
    && (detail.head === head || (detail.head === null && detail.layer === layer)));
  if (!mine.length) return [];
  const text = (value) => (known(value) ? minus(String(Number(value.toPrecision(3)))) : "–");
  const named = (detail) => (detail.head === null ? `${detail.name} (layer ${layer})` : detail.name);
  const rows = mine.map((detail) => el("tr", {},
    el("th", { scope: "row", title: detail.meaning }, named(detail)),
    el("td", { class: detail.at ? null : "num" }, detail.at ? profile(detail, text) : text(detail.values[0]))));
  return [
    el("h4", {}, `${data.roles[state.role].title}: in detail`),
    el("table", { class: "card-details" }, el("tbody", {}, rows)),
  ];
}

function profile(detail, text) {
  const points = detail.at.map((at, index) => [at, detail.values[index]]).filter(([, value]) => known(value));
  if (!points.length) return "–";
  const [width, height, pad] = [180, 36, 3];
  const [first, last] = [points[0][0], points.at(-1)[0]];
  const values = points.map(([, value]) => value);
  const [low, high] = [Math.min(0, ...values), Math.max(0, ...values)];
  const y = (value) => height - pad - ((value - low) / (high - low || 1)) * (height - 2 * pad);
  const x = (index) => pad + (index / Math.max(1, points.length - 1)) * (width - 2 * pad);
  const line = points.map(([, value], index) => `${index ? "L" : "M"}${x(index).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  const top = points[values.indexOf(Math.max(...values))];
  const about = `${detail.meaning}: from ${text(first)} to ${text(last)}, highest ${text(top[1])} at ${text(top[0])}`;
  const plot = svg("svg", { class: "profile", width, height, role: "img", "aria-label": about },
    svg("title", {}, about),
    svg("path", { class: "axis", d: `M${pad} ${y(0).toFixed(1)}H${width - pad}` }),
    svg("path", { class: "line", d: line }));
  return el("span", { class: "profile-cell" }, plot,
    el("small", {}, `${text(first)} … ${text(last)}, highest ${text(top[1])} at ${text(top[0])}`));
}

function examplePart(head) {
  const role = data.roles[state.role];
  const mine = examplesOf(head).filter((example) => example.role === state.role);
  const title = el("h4", {}, `${role.title}: where it attends`);
  if (!mine.length) return [title, ...elsewhere(head, role)];
  const kinds = KINDS.filter((kind) => mine.some((example) => example.kind === kind));
  const kind = kinds.includes(state.kind) ? state.kind : kinds[0];
  const tabs = el("div", { class: "kinds", role: "group", "aria-label": "Which rows" }, kinds.map((name) => {
    const pick = () => { state.kind = name; paintCard(); byId("card").querySelector("[aria-pressed=true]").focus(); };
    const count = mine.filter((example) => example.kind === name).length;
    return el("button", { type: "button", "aria-pressed": String(name === kind), onclick: pick }, `${name} (${count})`);
  }));
  const shown = mine.filter((example) => example.kind === kind).map((example) => exampleBlock(role, example));
  const keyText = "Outlined: the query. Shade grows with the square root of its attention to each key. "
    + "Point at a token, or focus the text and use the arrow keys, for the weight.";
  return [title, tabs, ...shown, el("p", { class: "shade-key" }, keyText)];
}

function elsewhere(head, role) {
  const others = [...new Set(examplesOf(head).map((example) => example.role))];
  const heads = [...new Set(data.examples.filter((e) => e.role === state.role).map((e) => e.head))];
  const parts = [el("p", { class: "muted" }, `No example was kept for ${label(head)} here.`)];
  if (others.length) {
    parts.push(el("p", { class: "muted" }, "It has examples for:"), el("div", { class: "refs" }, others.map((index) =>
      el("button", { type: "button", onclick: () => select({ role: index }) }, data.roles[index].title))));
  }
  if (heads.length) {
    parts.push(el("p", { class: "muted" }, "Heads with examples for this role:"), el("div", { class: "refs" },
      heads.map((other) => el("button", { type: "button", onclick: () => select({ head: other }) }, label(other)))));
  }
  return parts;
}

function exampleBlock(role, example) {
  const text = el("p", { class: "tokens", tabindex: 0, dir: "ltr", "aria-label": "Tokens, shaded by attention" });
  const spans = [];
  let position = 0;
  example.tokens.forEach((token, index) => {
    const weight = example.weights[index] / 10000;
    if (token < 0) {
      const gap = `⋯ ${(-token).toLocaleString("en")} tokens, weight ${weight.toFixed(3)} ⋯`;
      text.append(el("span", { class: "gap" }, gap));
      position -= token;
      return;
    }
    const shade = weight >= 0.0005 ? Math.min(SHADES, Math.ceil(SHADES * Math.sqrt(weight))) : 0;
    const classes = ["t"];
    if (shade) classes.push(`w${shade}`);
    if (position === example.query) classes.push("query");
    if (position >= example.keys) classes.push("after");
    const span = el("span", { class: classes.join(" ") }, data.tokens[token]);
    spans.push({ span, text: data.tokens[token], position, weight });
    text.append(span);
    position += 1;
  });
  pointable(text, spans, example);
  const head = el("p", { class: "example-head" },
    `value ${number(role, example.value)}, query at position ${example.query}`);
  const strongest = [...spans].sort((a, b) => b.weight - a.weight).slice(0, 4).filter((item) => item.weight > 0);
  const list = strongest.map((item) => el("span", {},
    el("q", {}, item.text), " ", el("small", {}, `at ${item.position}: ${item.weight.toFixed(3)}`)));
  return el("div", { class: "example" }, head, text, el("p", { class: "strongest" }, "Strongest: ", list));
}

function pointable(text, spans, example) {
  const bySpan = new Map(spans.map((item, index) => [item.span, index]));
  let at = -1;
  const point = (index) => {
    if (at >= 0) spans[at].span.classList.remove("pointed");
    at = index;
    if (index < 0) return hideTip();
    const item = spans[index];
    item.span.classList.add("pointed");
    const after = item.position >= example.keys;
    const distance = example.query - item.position;
    const where = distance === 0 ? "the query itself" : distance > 0 ? `${distance} before the query` : `${-distance} after the query`;
    showTip(item.span, true, el("div", {}, el("b", {}, item.text)), pairs([
      ["weight", after ? "not attended" : item.weight.toFixed(4)],
      ["position", `${item.position}, ${where}`],
    ]));
  };
  text.addEventListener("pointerover", (event) => {
    const index = bySpan.get(event.target);
    point(index === undefined ? -1 : index);
  });
  text.addEventListener("pointerleave", () => point(-1));
  text.addEventListener("blur", () => point(-1));
  text.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    const start = at >= 0 ? at : spans.findIndex((item) => item.position === example.query) - move;
    const next = Math.max(0, Math.min(spans.length - 1, start + move));
    spans[next].span.scrollIntoView({ block: "nearest" });
    point(next);
  });
}
