"use strict";
// The parts of the page.  Each report is drawn over the last one, so that focus and open parts stay where they are.
const state = { report: null, seenAt: 0, incidents: [], token: sessionStorage.getItem("token") || "", rates: {}, said: [], classes: {} };
const $ = (id) => document.getElementById(id);

// -- making and patching elements; text only ever becomes text

const shown = (child) => child !== null && child !== undefined && child !== false && child !== "";

function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === true) element.setAttribute(name, "");
    else if (shown(value)) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter(shown));
  return element;
}

function patch(old, fresh) {
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of [...fresh.attributes]) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  if (old.hasAttribute("data-plot")) return;
  const a = [...old.childNodes], b = [...fresh.childNodes];
  b.forEach((node, i) => {
    const was = a[i];
    if (!was) old.append(node);
    else if (was.nodeName !== node.nodeName || was.dataset?.key !== node.dataset?.key) was.replaceWith(node);
    else if (node.nodeType !== Node.TEXT_NODE) patch(was, node);
    else if (was.nodeValue !== node.nodeValue) was.nodeValue = node.nodeValue;
  });
  a.slice(b.length).forEach((node) => node.remove());
}

function fill(id, ...children) {
  const old = $(id), fresh = old.cloneNode(false);
  fresh.append(...children.flat(Infinity).filter(shown));
  patch(old, fresh);
}

// -- figures

const now = () => state.report.at + (performance.now() - state.seenAt) / 1000;      // by the daemon's clock
const since = (at) => span(now() - at);
const named = (class_) => state.classes[class_]?.[language] || class_.replaceAll("_", " ");
const said_in = (told, key) => (language === "zh" && told[`${key}_zh`]) || told[key];
const dots = (...parts) => parts.flat().filter(Boolean).join(" · ");
const TONES = { serving: "good", asleep: "calm", stopped: "calm", suspect: "warn", held: "bad", wedged: "bad" };
const tone = (phase) => TONES[phase] || "busy";
const gapOf = (change) => (change.gap_s === null ? t("gap_open") : t("gap", { s: span(change.gap_s) }));

function draw() {
  const report = state.report;
  if (!report) return;
  plots.gpus = Array.isArray(report.gpus) ? report.gpus : [];
  plots.engines = report.engines;
  plots.incidents = state.incidents;
  $("host").textContent = report.daemon.host;
  $("pause").textContent = t(report.paused ? "resume" : "pause");
  $("pause").dataset.act = report.paused ? "resume" : "pause";
  [$("pause"), $("snapshot")].forEach(operable);
  fill("answers", serving(report), happened(report), doing(report), room(report));
  fill("open", report.incidents.map(openIncident));
  fill("engines", report.services.map((service) => serviceOf(report, service)),
    report.fixed?.length > 0 && h("p", { class: "waits", "data-key": "fixed" }, t("waits_daemon", { keys: report.fixed.join(", ") })));
  fill("load-keys", report.engines.map((engine, i) => h("span", { class: "key", "data-colour": i }, h("i"), engine.name)));
  fill("load", ["rss", "kv", "requests", "tokens"].map((key) => loadOf(report, key)));
  cards(report);
  pastIncidents();
  channels(report);
  machine(report);
  contact();
}

function operable(button) {
  const can = state.report.daemon.operable;
  button.toggleAttribute("disabled", !can);
  if (!can) button.setAttribute("title", t("not_operable", { verb: button.dataset.act }));
  return button;
}

// -- four answers

const answer = (question, tone_, text, detail) =>
  h("div", { class: `answer ${tone_}` }, h("h2", null, question), h("p", null, text), h("small", null, detail || "\u00a0"));

function serving({ services, health }) {
  const served = services.filter((service) => service.serving);
  const first = services.find((service) => !service.serving) || services.find((service) => service.side === "backup") || services[0];
  if (!first) return answer(t("q_serving"), "bad", "–");
  const who = first.serving ? t("serves", { engine: first.serving }) : t("nobody", { service: first.name });
  const all = served.length === services.length ? t("all_serve", { n: served.length }) : t("of_served", { n: served.length, m: services.length });
  const detail = services.length > 1 ? all : t("on_port", { port: first.port, since: clock(first.since) });
  const tones = { healthy: "good", degraded: "warn", down: "bad" };
  return answer(t("q_serving"), `verdict ${tones[health]}`, [h("b", null, t(health)), ` ${who}`], detail);
}

function happened(report) {
  const latest = Object.values(report.totals.latest).sort((a, b) => b.at - a.at)[0], newest = state.incidents[0];
  if (!latest && !newest) return answer(t("q_last"), "calm", t("nothing_ever"), t("up_since") + " " + since(report.daemon.started));
  const change = latest && `${t(`did_${latest.kind}`)} ${latest.leaving} → ${latest.to}, ${gapOf(latest)}`;
  if (!newest) return answer(t("q_last"), "calm", change, t("ago", { s: since(latest.at) }));
  return answer(t("q_last"), newest.wall_resolved ? "calm" : "warn", `${newest.engine}: ${named(newest.class)}`,
    dots(t("ago", { s: since(newest.wall_opened) }), change));
}

function doing(report) {
  const busy = report.engines.find((engine) => tone(engine.phase) === "busy" || engine.phase === "suspect");
  const page = report.incidents.find((incident) => incident.urgency === "page");
  if (report.paused) return answer(t("q_doing"), "warn", t("paused"));
  const stuck = report.engines.filter((engine) => ["held", "wedged"].includes(engine.phase) || page?.waits_for.includes(engine.name));
  if (page || stuck.length) return answer(t("q_doing"), "bad", t("waits_human", { who: stuck.map((one) => one.name).join(", ") || page.service }), toType(page, stuck));
  if (!busy) return answer(t("q_doing"), "good", t("nothing_to_do"), t("watching"));
  const detail = busy.next_try ? t("next_try", { s: span(busy.next_try - now()) }) : progress(busy) || t("since", { s: since(busy.since) });
  return answer(t("q_doing"), "warn", t("working", { engine: busy.name, phase: t(`phase_${busy.phase}`) }), detail);
}

// A held engine starts by a restart; what else needs a human is told by its incident.
function toType(page, stuck) {
  const held = stuck.filter((engine) => engine.phase === "held").map((engine) => `llm-watchdog restart ${engine.name}`);
  return held.length ? t("type_restart", { command: held.join("; ") }) : page ? t("type_read", { command: `llm-watchdog incidents ${page.id}` }) : said_in(stuck[0], "why");
}

function room(report) {
  if (!Array.isArray(report.gpus) || !report.gpus.length) return answer(t("q_next"), "calm", t("no_gpu"), report.gpus.unknown);
  const left = (gpu) => (gpu.vram_warn ?? 1) * gpu.total_bytes - gpu.used_bytes;
  const near = [...report.gpus].sort((a, b) => left(a) - left(b))[0], over = left(near) < 0;
  const raised = report.symptoms.map((symptom) => `${symptom.subject}: ${named(symptom.class)}`).join(", ");
  return answer(t("q_next"), raised || over ? "warn" : "good",
    `GPU ${near.index} ${t(over ? "over" : "headroom", { left: gib(Math.abs(left(near))) })}`, raised || t("none_near"));
}

const openIncident = (incident) =>
  h("article", { class: `open ${incident.urgency}`, "data-key": incident.id },
    h("button", { class: "link", "data-incident": incident.id }, h("b", null, named(incident.class)),
      h("span", null, said_in(incident, "text"))),
    h("small", null, dots(incident.service, t(incident.urgency), t("ago", { s: since(incident.opened) }))));

// -- engines

function serviceOf(report, service) {
  const engines = report.engines.filter((engine) => engine.name === service.name || engine.backup_for === service.name);
  const latest = report.totals.latest[service.name];
  const to = service.serving ? `→ ${service.serving} :${service.port}` : `→ ${t("nobody", { service: "" })}`;
  return h("div", { class: "service", "data-key": service.name },
    h("div", { class: "route" }, h("h3", null, service.name), h("span", { class: service.serving ? "to good" : "to bad" }, to),
      h("small", null, latest ? dots(`${t(`did_${latest.kind}`)} ${clock(latest.at)}`, gapOf(latest)) : ""),
      service.lowered && h("span", { class: "badge warn", title: said_in(service.lowered, "why") }, t("lowered", { n: service.lowered.to })),
      engines.length > 1 && act(service.side === "backup" ? "failback" : "failover", service.name)),
    report.gateway && throughGateway(report.gateway, service.name),
    engines.map((engine) => engineOf(engine, report.pending?.[engine.name])));
}

// What waits in the gateway for a service, what its engine has, and what keeps requests from it.
function throughGateway(gateway, name) {
  const line = (...rest) => h("p", { class: "gateway", "data-key": "gateway" }, h("b", null, t("gateway")), " ", ...rest);
  const load = gateway.services?.find((one) => one.service === name);
  if (!load) return line(t("gateway_silent"), gateway.unknown && language === "en" && `: ${gateway.unknown}`);
  const count = (n, most) => (most == null ? n.toLocaleString("en") : t("of", { n: n.toLocaleString("en"), most: most.toLocaleString("en") }));
  const has = load.engine && [t("in_flight", { n: count(load.requests, load.max_concurrent) }),
    t("prompt_tokens", { n: count(load.prompt_tokens, load.max_tokens) })];
  return line(dots(has, t("in_line", { n: load.waiting }), load.waiting_long && t("long_ones", { n: load.waiting_long }),
    t("connections", { n: gateway.connections }), gateway.quarantined && t("quarantined", { n: gateway.quarantined })),
  load.breaker !== "closed" && [" ", h("span", { class: "badge bad" }, t(`breaker_${load.breaker}`))],
  load.throttled && [" ", h("span", { class: "badge warn", title: language === "en" && load.throttled }, t("throttled"))]);
}

const act = (verb, engine) =>
  operable(h("button", { class: "quiet", "data-act": verb, "data-engine": engine, "aria-label": `${t(verb)}: ${engine}` }, t(verb)));

function engineOf(engine, pending) {
  const { tree, metrics, profile } = engine;
  const args = Object.entries(profile).filter(([key]) => key !== "model").map(([key, value]) => `${key} ${value}`);
  const chips = [engine.backup_for && t("standby", { engine: engine.backup_for }), profile.model, ...args,
    engine.gpus.length && `GPU ${engine.gpus.join(", ")}`, `:${engine.port}`].filter(Boolean);
  const time = engine.phase === "serving" && engine.ready ? t("up", { s: since(engine.ready) }) : t("since", { s: since(engine.since) });
  return h("article", { class: "engine", "data-key": engine.name },
    h("div", { class: "who" }, h("h4", null, engine.name), h("span", { class: `badge ${tone(engine.phase)}` }, t(`phase_${engine.phase}`)),
      h("small", null, dots(engine.generation && t("generation", { n: engine.generation }), time, progress(engine))), act("restart", engine.name)),
    h("div", { class: "chips" }, chips.map((chip) => h("span", null, chip))),
    engine.pid && h("dl", { class: "figures" },
      figure("rss", tree ? size(tree.rss_bytes) : "–"), figure("cpu", tree ? tree.cpu.toFixed(1) : "–"),
      figure("kv", metrics.kv_usage == null ? "–" : percent(metrics.kv_usage)), figure("running", metrics.running),
      figure("waiting", metrics.waiting), figure("tokens", state.rates[engine.name]?.rate)),
    pending && h("p", { class: "waits" }, t("waits_start", { keys: pending.join(", ") })),
    engine.growth.filter((one) => one.leaks).map(leakOf),
    engine.doubt && h("p", { class: "waits" }, said_in(engine, "doubt")),
    engine.cause && h("p", { class: "why" }, h("b", null, named(engine.cause)), ` ${said_in(engine, "why")}`),
    engine.waits && h("p", { class: "waits" }, h("b", null, t("waits")), ` ${said_in(engine, "waits")}`));
}

// What grows until a limit, and what to do about it.
const leakOf = (one) => h("div", { class: "leak", "data-key": one.what },
  h("p", null, h("b", null, named(one.class)), ` ${dots(one.who, said_in(one, "text"))}`),
  h("ul", null, (state.classes[one.class]?.advice || []).map((each) => h("li", null, each[language]))));

const figure = (word, value) => h("div", null, h("dt", null, t(word)), h("dd", null, String(value ?? "–")));

function progress(engine) {
  const load = engine.phase === "loading" && engine.loading;
  return load ? dots(load.stage, load.about_s && t("of_about", { s: since(engine.since), about: span(load.about_s) })) : "";
}

// -- plots' frames

function loadOf(report, key) {
  const told = (engine) => ({
    rss: engine.tree && size(engine.tree.rss_bytes), kv: engine.metrics.kv_usage != null && percent(engine.metrics.kv_usage),
    requests: engine.metrics.running, tokens: state.rates[engine.name]?.rate })[key];
  const head = { rss: `${t("rss")}, GiB`, kv: `${t("kv")}, %`, requests: `${t("running")} ― ${t("waiting")} ┄`, tokens: t("tokens") }[key];
  const runs = report.engines.filter((engine) => engine.pid);
  return h("figure", { "data-key": key },
    h("figcaption", null, h("b", null, head)),
    h("div", { "data-plot": key, role: "img", "aria-label": `${head}: ${runs.map((engine) => `${engine.name} ${told(engine) || "–"}`).join(", ")}` }));
}

function cards(report) {
  if (!Array.isArray(report.gpus)) fill("cards", h("p", { class: "none" }, `${t("no_gpu")}: ${report.gpus.unknown}`));
  else fill("cards", report.gpus.map((gpu) => cardOf(report, gpu)));
  for (const key of document.querySelectorAll("[data-colour]")) {
    key.firstChild.style.background = key.dataset.colour === "others" ? css("--others") : colour(+key.dataset.colour);
  }
}

function cardOf(report, gpu) {
  const held = {}, names = report.engines.map((engine) => engine.name);
  for (const row of gpu.processes) {
    const who = row.engine ? row.engine.split("#")[0] : "others";
    held[who] = (held[who] || 0) + (row.used_bytes || 0);
  }
  const keys = Object.entries(held).map(([who, bytes]) =>
    h("span", { class: "key", "data-key": who, "data-colour": who === "others" ? who : names.indexOf(who) }, h("i"),
      `${who === "others" ? t(who) : who} ${gib(bytes)}`));
  const text = t("used_of", { used: gib(gpu.used_bytes), total: gib(gpu.total_bytes), share: percent(gpu.used_bytes / gpu.total_bytes) });
  const facts = dots(gpu.utilization != null && `${gpu.utilization} %`, gpu.temperature_c != null && `${gpu.temperature_c} °C`);
  return h("figure", { "data-key": gpu.index },
    h("figcaption", null, h("b", null, `GPU ${gpu.index}`), h("span", { class: "used" }, text), h("span", null, dots(gpu.name, facts)),
      h("span", { class: "keys" }, keys)),
    h("div", { "data-plot": `gpu-${gpu.index}`, role: "img", "aria-label": `GPU ${gpu.index}: ${text}; ${keys.map((key) => key.textContent).join(", ")}` }));
}

// -- the side

function pastIncidents() {
  if (!state.incidents.length) return fill("history", h("li", { class: "none" }, t("no_history")));
  return fill("history", state.incidents.slice(0, 40).map((row) =>
    h("li", { class: row.wall_resolved ? row.urgency : `${row.urgency} still`, "data-key": row.id },
      h("button", { class: "link", "data-incident": row.id }, h("b", null, named(row.class)), h("span", null, row.engine)),
      h("small", null, dots(clock(row.wall_opened, true), row.wall_resolved ? t("lasted", { s: span(row.wall_resolved - row.wall_opened) }) : t("still"))))));
}

function channels({ alerts }) {
  if (!alerts.length) return fill("alerts", h("p", { class: "none" }, t("no_channels")));
  return fill("alerts", alerts.map((channel) =>
    h("p", { class: channel.failing ? "channel bad" : "channel good", "data-key": channel.name }, h("b", null, channel.name),
      h("small", null, dots(channel.delivered_wall ? t("delivered", { s: since(channel.delivered_wall) }) : t("never"),
        channel.waiting && t("n_waiting", { n: channel.waiting }), channel.failing)))));
}

function machine({ host, daemon, kernel_log: kernel, restarts_24h: restarts }) {
  const row = (word, value) => h("div", null, h("dt", null, t(word)), h("dd", null, String(value)));
  fill("machine", "unknown" in host ? row("memory_free", host.unknown) : [
    row("memory_free", `${gib(host.memory_available)} / ${gib(host.memory_total)} GiB`),
    row("disk_free", `${gib(host.disk_free)} / ${gib(host.disk_total)} GiB`), row("load_avg", host.load.toFixed(1))],
  row("kernel", kernel.unknown || t("read")), row("restarts", restarts), row("up_since", since(daemon.started)),
  row("lag", `${(daemon.lag_s * 1000).toFixed(1)} ms`), row("version", daemon.version));
}

// -- is the daemon there?

const LIVE_S = 5;

function contact() {
  const age = (performance.now() - state.seenAt) / 1000, lost = Boolean(state.report) && age > LIVE_S;
  const health = !state.report || lost ? "unknown" : state.report.health;
  document.body.classList.toggle("lost", lost);
  document.body.dataset.health = health;
  const word = !state.report ? t("loading_page") : t(lost ? "unknown" : "live");
  if ($("contact").textContent !== word) $("contact").textContent = word;
  $("gone").hidden = !lost;
  if (lost) $("gone").textContent = t("gone", { s: span(age), when: clock(state.report.at) });
  document.title = state.report ? `${t(health)} · llm-watchdog` : "llm-watchdog";
  const tones = { healthy: "2f9e6e", degraded: "d9902f", down: "d64545", unknown: "8a94a6" };
  const icon = `data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Ccircle cx='8' cy='8' r='7' fill='%23${tones[health]}'/%3E%3C/svg%3E`;
  if ($("icon").getAttribute("href") !== icon) $("icon").setAttribute("href", icon);
}
