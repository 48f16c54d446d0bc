"use strict";
// What comes in, what people do, and one incident's dialog.

// -- what comes in

function listen() {
  const source = new EventSource("api/v1/events");
  source.addEventListener("report", (event) => take(JSON.parse(event.data)));
  source.addEventListener("said", (event) => said(JSON.parse(event.data)));
  source.onerror = () => { if (source.readyState === EventSource.CLOSED) setTimeout(listen, 2000); };
}

function take(report) {
  const first = !state.report;
  for (const engine of report.engines) rate(engine, report.at);
  const known = new Set(state.incidents.filter((row) => !row.wall_resolved).map((row) => row.id));
  const open = report.incidents.map((incident) => incident.id);
  state.report = report;
  state.seenAt = performance.now();
  if (first || known.size !== open.length || open.some((id) => !known.has(id))) askHistory();
  draw();
  plots.fetch().catch(() => {});      // the daemon is gone: that is told by its age
  if (first && location.hash.startsWith("#incident=")) show(decodeURIComponent(location.hash.slice(10)));
}

// Tokens a second, over at least a second and a half, since one generation began to count.
function rate({ name, generation, metrics }, at) {
  const tokens = metrics.generation_tokens, was = state.rates[name];
  if (tokens == null) delete state.rates[name];
  else if (!was || was.generation !== generation || tokens < was.tokens) state.rates[name] = { generation, tokens, at };
  else if (at - was.at >= 1.5) state.rates[name] = { generation, tokens, at, rate: Math.round((tokens - was.tokens) / (at - was.at)) };
}

let asking = false;
async function askHistory() {
  if (asking) return;
  asking = true;
  try {
    const answer = await fetch("api/v1/incidents?limit=200");
    if (answer.ok) {
      state.incidents = (await answer.json()).incidents;
      draw();
      plots.draw();
    }
  } catch { /* the daemon is gone: that is told by its age */ } finally { asking = false; }
}

function said(line) {
  state.said.unshift(line);
  state.said.length = Math.min(state.said.length, 60);
  $("said").replaceChildren(...state.said.map(saidLine));
}

// A line of the journal in words; its fields where it has none.
function saidLine(line) {
  const rest = Object.entries(line).filter(([key]) => !["wall", "at", "say", "decided"].includes(key)).map(([key, value]) => `${key}=${value}`);
  const time = line.wall ? clock(Date.parse(line.wall) / 1000) : "";
  return h("li", { title: line.say }, h("time", null, time), line.words ? ` ${line.words[language]}` : [h("b", null, line.say), ` ${rest.join(" ")}`]);
}

// -- one incident

async function show(id) {
  const found = await fetch(`api/v1/incidents/${encodeURIComponent(id)}`).catch(() => null);
  if (!found?.ok) return toast(t("failed"), found ? (await found.json()).detail : t("unknown"), "bad");
  const row = await found.json(), whole = row.incident;
  window.history.replaceState(null, "", `#incident=${encodeURIComponent(id)}`);
  const lasted = row.wall_resolved ? t("lasted", { s: span(row.wall_resolved - row.wall_opened) }) : t("still");
  $("incident").replaceChildren(...[
    h("div", { class: "dialog-head" }, h("h2", { id: "incident-head", tabindex: -1 }, row.title?.[language] || named(row.class)),
      h("button", { class: "quiet", "data-close": "1" }, t("close"))),
    h("p", { class: "meta" }, h("span", { class: `badge ${row.urgency === "warning" ? "warn" : "bad"}` }, t(row.urgency)), " ",
      dots(`${row.engine}#${whole.generation}`, t("opened", { when: clock(row.wall_opened, true) }), lasted)),
    row.state && h("p", { class: whole.needs?.length ? "page-text" : "state" }, row.state[language]), row.gap && h("p", { class: "state" }, row.gap[language]),
    h("h3", null, t("cause")), h("pre", { tabindex: 0 }, row.cause?.[language] || row.class),
    whole.findings.length && [h("h3", null, t("proof")), h("pre", { tabindex: 0 }, whole.findings.map((finding) => finding.text).join("\n"))],
    row.advice.length && [h("h3", null, t("advice")), h("ol", { class: "advice" }, row.advice.map((one) => h("li", null, one[language])))],
    row.actions.length && [h("h3", null, t("deeds")), h("ol", { class: "timeline deeds" }, row.actions.map((one) => h("li", null, h("time", null, clock(one.at)), h("span", null, one[language]))))],
    h("h3", null, t("timeline")),
    h("ol", { class: "timeline" }, row.timeline.map((entry) =>
      h("li", null, h("time", null, clock(entry.at)), h("b", null, entry.what[language]), h("span", null, entry[language])))),
    h("h3", null, t("evidence")),
    h("div", { id: "files" }, h("p", { class: "folder" }, `${state.report.daemon.log_dir}/incidents/${row.id}`),
      operable(h("button", { class: "quiet", "data-files": row.id, "data-act-name": "files" }, t("show_files")))),
  ].flat().filter((part) => part instanceof Node));
  if (!$("incident").open) $("incident").showModal();
  $("incident").scrollTop = 0;
  return $("incident-head").focus();
}

async function files(id, name) {
  const at = `api/v1/incidents/${encodeURIComponent(id)}/files${name ? `/${encodeURIComponent(name)}` : ""}`;
  const answered = await withToken("files", {}, (headers) => fetch(at, { headers }));
  if (!answered) return;
  if (name) {
    $("files").querySelector("pre")?.remove();
    $("files").append(h("pre", { tabindex: 0, "aria-label": name }, await answered.text()));
    return;
  }
  const listed = await answered.json();
  const rows = listed.files.map((file) =>
    h("li", null, h("button", { class: "link", "data-file": file.name, "data-of": id }, file.name), h("small", null, ` ${(file.bytes / 1024).toFixed(1)} KiB`)));
  $("files").replaceChildren(h("p", { class: "folder" }, listed.folder),
    rows.length ? h("ul", { class: "files" }, rows) : h("p", { class: "none" }, t("no_files")));
}

// -- operating

async function operate(verb, engine) {
  const at = verb === "restart" ? `api/v1/engines/${encodeURIComponent(engine)}/restart` : `api/v1/${verb}`;
  const named = engine && verb !== "restart" ? { engine } : {};
  const answered = await withToken(verb, { engine }, (headers, reason) => fetch(at, {
    method: "POST", headers: { ...headers, "Content-Type": "application/json" }, body: JSON.stringify({ ...named, ...(reason ? { reason } : {}) }) }));
  if (answered) toast(t("done"), (await answered.json()).text, "good");
}

// Asks for confirmation, and once for the token; the answer, or null after telling why there is none.
async function withToken(verb, values, send) {
  const wish = verb === "files" && state.token ? { reason: "" } : await confirmed(verb, values);
  if (!wish) return null;
  try {
    const answered = await send({ Authorization: `Bearer ${state.token}` }, wish.reason);
    if (answered.ok) return answered;
    if (answered.status === 401 || answered.status === 403) {
      state.token = "";
      sessionStorage.removeItem("token");
    }
    toast(t("failed"), (await answered.json()).detail, "bad");
  } catch { toast(t("failed"), t("unknown"), "bad"); }
  return null;
}

function confirmed(verb, values) {
  const dialog = $("ask"), files_ = verb === "files";
  dialog.replaceChildren(h("form", { method: "dialog" },
    h("h2", { id: "ask-head" }, files_ ? t("evidence") : `${t(verb)} ${values.engine || ""}`), h("p", null, t(`ask_${verb}`, values)),
    !state.token && h("label", null, t("token"), h("input", { name: "token", type: "password", required: true, autocomplete: "off", minlength: 16 })),
    !files_ && h("label", null, t("reason"), h("input", { name: "reason", maxlength: 200, autocomplete: "off" })),
    h("div", { class: "buttons" }, h("button", { class: "quiet", type: "button", "data-close": "1" }, t("cancel")), h("button", { value: "go", class: "main" }, t("go")))));
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((done) => dialog.addEventListener("close", () => {
    const { token, reason } = dialog.querySelector("form").elements;
    if (dialog.returnValue !== "go") return done(null);
    if (token) {
      state.token = token.value.trim();
      sessionStorage.setItem("token", state.token);
    }
    return done({ reason: reason?.value || "" });
  }, { once: true }));
}

let toastTimer = 0;
function toast(head, text, tone_) {
  $("toast").className = tone_;
  $("toast").replaceChildren(h("b", null, head), ` ${text || ""}`);
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => $("toast").replaceChildren(), 8000);
}

// -- what people do

document.addEventListener("click", (event) => {
  const one = event.target.closest("button");
  if (!one) return;
  const { act: verb, engine, incident, range, close, files: of, file } = one.dataset;
  if (verb) operate(verb, engine);
  else if (incident) show(incident);
  else if (range) { ranges(range); plots.choose(range).catch(() => {}); }
  else if (close) one.closest("dialog").close();
  else if (of) files(of);
  else if (file) files(one.dataset.of, file);
});
$("incident").addEventListener("close", () => window.history.replaceState(null, "", location.pathname));
$("theme").addEventListener("click", () => { setTheme(dark() ? "light" : "dark"); again(); });
$("language").addEventListener("click", () => {
  language = language === "en" ? "zh" : "en";
  localStorage.setItem("language", language);
  translate();
  again();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
addEventListener("resize", () => plots.draw());

function again() {
  draw();
  $("said").replaceChildren(...state.said.map(saidLine));
  plots.redraw();
}

function setTheme(theme) {
  if (!theme) return;
  document.documentElement.dataset.theme = theme;
  localStorage.setItem("theme", theme);
}

function ranges(chosen) {
  for (const one of document.querySelectorAll("[data-range]")) one.setAttribute("aria-pressed", String(one.dataset.range === chosen));
}

function translate() {
  document.documentElement.lang = language;
  for (const one of document.querySelectorAll("[data-t]")) one.textContent = t(one.dataset.t);
  $("language").textContent = language === "en" ? "中文" : "English";
  $("language").lang = language === "en" ? "zh" : "en";
}

setTheme(localStorage.getItem("theme"));
translate();
fetch("api/v1/classes").then((answer) => answer.json()).then(({ classes }) => { state.classes = classes; draw(); }).catch(() => {});    // raw names do
ranges(plots.range);
contact();
listen();
setInterval(() => {
  contact();
  if (state.report && !document.body.classList.contains("lost")) draw();
}, 1000);
