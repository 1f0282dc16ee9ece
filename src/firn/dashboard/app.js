// The page: signs in, follows the server, and lays out the panels.

import { html, render, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { Calls } from "./calls.js";
import { Chat } from "./chat.js";
import { Rates, writtenNow } from "./charts.js";
import { count, percent, rate, seconds } from "./format.js";
import { Models } from "./models.js";
import { Announcement } from "./components.js";
import { key, read, write } from "./server.js";
import { Store } from "./store.js";
import { Memory, Tiers } from "./tiers.js";
import { Tree } from "./tree.js";

const store = new Store();

function App() {
  const [, setVersion] = useState(0);
  const [wanted, setWanted] = useState("");
  useEffect(() => {
    const end = store.subscribe(() => setVersion((n) => n + 1));
    store.watch();
    return end;
  }, []);
  if (store.status === "key") return html`<${SignIn} why=${store.why} />`;
  const names = store.models.map((m) => m.id);
  const chosen = names.includes(wanted) ? wanted : "";
  const model = chosen || defaultModel(store.models);
  const state = store.states.get(model);
  const off = state?.cache?.enabled === false ? state.cache.why || "switched off" : "";
  return html`<a class="skip" href="#requests">To the requests</a>
    <header class="top">
      <h1><img src="page/icon.svg" alt="" width="26" height="26" /> firn</h1>
      <${ConnectionStatus} />
      <div class="tools">
        ${names.length > 1 && html`<span class="field"><label for="model">Model</label> <select id="model" value=${chosen} onChange=${(e) => setWanted(e.target.value)}>
          <option value="">all</option>${names.map((name) => html`<option value=${name}>${name}</option>`)}</select></span>`}
        <${Theme} />
        ${key.get() && html`<button onClick=${leave}>Forget the key</button>`}
      </div>
    </header>
    ${store.outdated && html`<p class="banner" role="status">The server was updated. <button class="link" onClick=${() => location.reload()}>Load the new page</button></p>`}
    ${store.status === "lost" && html`<p class="banner lost" role="alert">${store.why} The page shows the last state it knew, and keeps trying.</p>`}
    <main>
      <${Headline} model=${chosen} />
      <${Calls} store=${store} model=${chosen} />
      <${Tree} store=${store} model=${model} off=${off} />
      <${Tiers} state=${state} />
      <${Memory} state=${state} />
      <${Models} store=${store} />
      <${Rates} store=${store} model=${chosen} />
      <${Chat} store=${store} model=${model} />
    </main>
    <footer>firn ${store.version} · <a href="docs" rel="noopener" target="_blank">API</a> · <a href="health" rel="noopener" target="_blank">health</a></footer>`;
}

/** The model of panels that show one: the default model, or a loaded one if that is not. */
function defaultModel(models) {
  const loaded = models.filter((m) => m.state === "loaded");
  const model = loaded.find((m) => m.default) ?? loaded[0] ?? models.find((m) => m.default) ?? models[0];
  return model?.id ?? "";
}

function leave() {
  key.set("");
  location.reload();
}

function ConnectionStatus() {
  const text = { live: "live", connecting: "connecting …", lost: "connection lost" }[store.status];
  return html`<p class="line ${store.status}"><span class="lamp" aria-hidden="true"></span>${text}</p><${Announcement}>${text}<//>`;
}

/** What reuse has saved, and what is going on. */
function Headline({ model }) {
  const caches = [...store.states.values()].filter((s) => !model || s.model === model).map((s) => s.cache).filter((c) => c?.tokens);
  const sum = (of) => caches.reduce((n, cache) => n + of(cache), 0);
  const idle = [...store.states.values()].some((s) => s.cache?.enabled === false) && !caches.length;
  const prompt = sum((c) => c.tokens.prompt);
  const cached = sum((c) => c.tokens.cached);
  const open = [...store.calls.values()].filter((c) => c.ended_s == null && (!model || c.model === model));
  const waiting = open.filter((c) => c.phase === "queued").length;
  const figures = [
    ["reused", prompt ? percent(cached / prompt) : "–", prompt ? `${count(cached)} of ${count(prompt)} prompt tokens` : idle ? "reuse is off" : "of prompt tokens, since the start"],
    ["saved", prompt ? seconds(sum((c) => c.seconds_saved)) : "–", "of computing, since the start"],
    ["under way", count(open.length - waiting), waiting ? `${count(waiting)} waiting` : "none waiting"],
    ["writing", rate(writtenNow(open, store.now())), "tokens per second"],
  ];
  return html`<dl class="headline">${figures.map(([name, value, text]) => html`<div key=${name}><dt>${name}</dt><dd><b>${value}</b><small>${text}</small></dd></div>`)}</dl>`;
}

function Theme() {
  const [theme, setTheme] = useState(read(localStorage, "firn.theme") || "system");
  const choose = (event) => {
    const next = event.target.value;
    setTheme(next);
    write(localStorage, "firn.theme", next === "system" ? "" : next);
    if (next === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
  };
  return html`<span class="field"><label for="theme">Theme</label> <select id="theme" value=${theme} onChange=${choose}>
    <option value="system">system</option><option value="light">light</option><option value="dark">dark</option></select></span>`;
}

function SignIn({ why }) {
  const field = useRef(null);
  useEffect(() => field.current?.focus(), [why]);
  const enter = (event) => {
    event.preventDefault();
    key.set(field.current.value.trim());
    store.watch();
  };
  return html`<main class="signin">
    <h1><img src="page/icon.svg" alt="" width="32" height="32" /> firn</h1>
    <form onSubmit=${enter}>
      <p role="alert">${key.get() ? why : "This server needs a key."}</p>
      <label for="key">API key</label>
      <input id="key" ref=${field} type="password" autocomplete="off" spellcheck="false" required />
      <button class="primary">Enter</button>
      <p class="hint">It stays in this tab and goes to this server only. An operator's key shows all requests, any other key its own.</p>
    </form>
  </main>`;
}

const root = document.getElementById("app");
root.replaceChildren();
render(html`<${App} />`, root);
