// Selecting a role and a head; the address remembers both.
const narrow = matchMedia("(max-width: 860px)");
const still = matchMedia("(prefers-reduced-motion: reduce)");

function select({ role = state.role, head = state.head, reveal = false, up = false }) {
  const changed = role !== state.role;
  Object.assign(state, { role, head });
  if (changed) {
    paintRole();
  } else {
    paintTable(role);
  }
  paintSelection();
  paintCard();
  hideTip();
  if (head !== null) byId("status").textContent = `${label(head)} selected, ${data.roles[role].title}`;
  if (reveal && (up || narrow.matches)) {
    byId("card").scrollIntoView({ block: "start", behavior: still.matches ? "auto" : "smooth" });
  }
  remember();
}

function paintRole() {
  const role = data.roles[state.role];
  document.querySelectorAll(".role-link").forEach((link) => {
    if (Number(link.dataset.role) === state.role) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  });
  document.querySelectorAll("section.role").forEach((section) => {
    section.classList.toggle("current", Number(section.dataset.role) === state.role);
  });
  byId("role-select").value = String(state.role);
  byId("role-question").textContent = role.question;
  paintMap();
  paintTable(state.role);
}

function remember() {
  const parts = new URLSearchParams({ role: data.roles[state.role].name });
  if (state.head !== null) parts.set("head", label(state.head));
  history.replaceState(null, "", `#${parts}`);
}

function recall() {
  const parts = new URLSearchParams(location.hash.slice(1));
  const role = data.roles.findIndex((item) => item.name === parts.get("role"));
  const head = headsByLabel.get(parts.get("head"));
  return { role: role >= 0 ? role : null, head: head ?? null };
}

function firstRole() {
  const index = data.roles.findIndex((role) => role.claimed.includes(1));
  return Math.max(0, index);
}

function start() {
  if (!data.roles.length || !data.heads.length) return;
  document.documentElement.classList.add("js");
  const asked = recall();
  state.role = asked.role ?? firstRole();
  state.head = asked.head ?? data.roles[state.role].order[0] ?? null;
  buildMap();
  buildTables();
  paintRole();
  paintSelection();
  paintCard();
  byId("role-select").addEventListener("change", (event) => pickRole(Number(event.target.value)));
  document.querySelectorAll(".role-link").forEach((link) => {
    link.addEventListener("click", (event) => {
      event.preventDefault();
      pickRole(Number(link.dataset.role));
      byId("explore").scrollIntoView({ block: "start", behavior: still.matches ? "auto" : "smooth" });
    });
  });
  document.querySelectorAll(".head-ref").forEach((place_) => {
    const head = headsByLabel.get(place_.dataset.head);
    if (head === undefined) return;
    const open = () => select({ head, reveal: true, up: true });
    place_.replaceChildren(el("button", { type: "button", onclick: open }, label(head)));
  });
  addEventListener("hashchange", () => {
    const wanted = recall();
    if (wanted.role !== null) select({ role: wanted.role, head: wanted.head ?? state.head });
  });
  addEventListener("scroll", hideTip, { passive: true });
}

// Choosing a role also shows its best head, unless the chosen head plays that role.
function pickRole(role) {
  const next = data.roles[role];
  const keep = state.head !== null && next.claimed[state.head];
  select({ role, head: keep ? state.head : next.order[0] ?? state.head });
}

start();
