// The ranked table of the current role: all heads, sortable and filterable, in pages.
const PAGE = 25;
const NUMERIC = ["score", "null", "effect", "p", "q", "n", "claimed"];

function tableState(index) {
  state.tables[index] ??= { key: null, down: true, filter: "", claimed: false, limit: PAGE };
  return state.tables[index];
}

function rowsOf(index) {
  const role = data.roles[index];
  const view = tableState(index);
  const wanted = view.filter.trim().toUpperCase();
  let rows = role.order.filter((head) => matches(role, head, wanted) && (!view.claimed || role.claimed[head]));
  if (view.key === "head") rows = [...rows].sort((a, b) => (view.down ? b - a : a - b));
  else if (NUMERIC.includes(view.key)) {
    const values = role[view.key];
    // Heads without a value stay last, whichever way the rest is sorted.
    rows = [...rows].sort((a, b) => {
      if (!known(values[a]) || !known(values[b])) return known(values[b]) - known(values[a]);
      return view.down ? values[b] - values[a] : values[a] - values[b];
    });
  }
  return rows;
}

function matches(role, head, wanted) {
  if (!wanted) return true;
  const [layer, at] = data.heads[head];
  if (/^L\d+$/.test(wanted)) return wanted === `L${layer}`;
  if (/^H\d+$/.test(wanted)) return wanted === `H${at}`;
  const note = known(role.note[head]) ? data.notes[role.note[head]] : "";
  return label(head).includes(wanted) || note.toUpperCase().includes(wanted);
}

function buildTables() {
  document.querySelectorAll("section.role").forEach((section) => {
    const index = Number(section.dataset.role);
    const view = tableState(index);
    section.querySelectorAll("thead th[data-key]").forEach((header) => {
      const key = header.dataset.key;
      const sort = el("button", { class: "sort", type: "button", onclick: () => {
        const first = !["head", "p", "q"].includes(key);
        Object.assign(view, { down: view.key === key ? !view.down : first, key });
        paintTable(index);
      } }, header.textContent);
      header.replaceChildren(sort);
    });
    const filter = el("input", { type: "search", placeholder: "Filter: L18, H6, L18H6, note",
      "aria-label": "Filter heads", oninput: (event) => {
        Object.assign(view, { filter: event.target.value, limit: PAGE });
        paintTable(index);
      } });
    const only = el("input", { type: "checkbox", onchange: (event) => {
      Object.assign(view, { claimed: event.target.checked, limit: PAGE });
      paintTable(index);
    } });
    const copy = el("button", { type: "button", onclick: () => copyCsv(index, copy) }, "Copy CSV");
    section.querySelector(".tools").replaceChildren(filter, el("label", {}, only, "claimed only"), copy);
  });
}

function paintTable(index) {
  const role = data.roles[index];
  const view = tableState(index);
  const section = byId(`role-${index}`);
  const rows = rowsOf(index);
  section.querySelectorAll("thead th[data-key]").forEach((header) => {
    if (header.dataset.key === view.key) header.setAttribute("aria-sort", view.down ? "descending" : "ascending");
    else header.removeAttribute("aria-sort");
  });
  section.querySelector("tbody").replaceChildren(...rows.slice(0, view.limit).map((head) => tableRow(role, head)));
  const shown = Math.min(view.limit, rows.length).toLocaleString("en");
  const total = role.order.length;
  const passing = rows.length === total ? "" : ` that pass the filter (${total.toLocaleString("en")} in all)`;
  const caps = section.querySelector(".caps");
  caps.replaceChildren(`Showing ${shown} of ${rows.length.toLocaleString("en")} heads${passing}.`);
  if (rows.length > view.limit) {
    caps.append(el("button", { type: "button", onclick: () => { view.limit += 100; paintTable(index); } }, "Show 100 more"));
  }
}

function tableRow(role, head) {
  const classes = [role.claimed[head] ? "is-claimed" : "", head === state.head ? "picked" : ""];
  const open = () => select({ head, reveal: true, up: true });
  const cells_ = [
    [number(role, role.score[head]), "num"],
    [strip(role, head) ?? "", "evidence"],
    [interval(role, head), "num"],
    [number(role, role.null[head]), "num"],
    [number(role, role.effect[head]), "num"],
    [small(role.p[head]), "num"],
    [small(role.q[head]), "num"],
    [known(role.n[head]) ? role.n[head].toLocaleString("en") : "–", "num"],
    [role.claimed[head] ? "claimed" : "", null],
    [known(role.note[head]) ? data.notes[role.note[head]] : "", "note"],
  ];
  return el("tr", { class: classes.join(" ").trim() },
    el("th", { scope: "row" }, el("button", { class: "link", type: "button", onclick: open }, label(head))),
    cells_.map(([content, kind]) => el("td", { class: kind }, content)));
}

// What the page holds; scores.parquet has every column.
function csv(index) {
  const role = data.roles[index];
  const columns = ["role", "layer", "head", "score", "ci_low", "ci_high", "n", "null_mean", "effect",
    "p_value", "q_value", "claimed", "note"];
  const quote = (value) => {
    const text = known(value) ? String(value) : "";
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const lines = rowsOf(index).map((head) => [
    role.name, ...data.heads[head], role.score[head], role.low[head], role.high[head], role.n[head],
    role.null[head], role.effect[head], role.p[head], role.q[head], role.claimed[head] === 1,
    known(role.note[head]) ? data.notes[role.note[head]] : "",
  ].map(quote).join(","));
  return `${[columns.join(","), ...lines].join("\n")}\n`;
}

async function copyCsv(index, button) {
  const text = csv(index);
  const copied = await copyText(text);
  const lines = text.split("\n").length - 2;
  button.textContent = copied ? `Copied ${lines.toLocaleString("en")} rows` : "Copying was refused";
  setTimeout(() => { button.textContent = "Copy CSV"; }, 2000);
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Pages opened as files or inside frames may lack the clipboard API; the old command still works there.
    const area = el("textarea", { readonly: true, class: "skip", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    return copied;
  }
}
