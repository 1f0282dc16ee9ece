// The page: signs in, follows the server, and lays out the panels.

import { html, render, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { Calls } from "./calls.js";
import { Chat } from "./chat.js";
import { Drafts, FirstTokens, Rates } from "./charts.js";
import { Connect } from "./connect.js";
import { count, percent, rate, seconds } from "./format.js";
import { Models } from "./models.js";
import { Announcement, useTick } from "./components.js";
import { key, read, write } from "./server.js";
import { Store } from "./store.js";
import { Storage } from "./storage.js";
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
      <${Connect} store=${store} model=${model} />
      <${Headline} model=${chosen} />
      <${Chat} store=${store} model=${model} />
      <${Calls} store=${store} model=${chosen} />
      <${Tree} store=${store} model=${model} off=${off} />
      <div class="cards">
        ${store.several && html`<${Models} store=${store} />`}
        <${Storage} state=${state} />
        <${Rates} store=${store} model=${chosen} />
        <${FirstTokens} store=${store} model=${chosen} />
        <${Drafts} store=${store} model=${chosen} />
      </div>
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
  const calls = [...store.calls.values()].filter((c) => !model || c.model === model);
  const open = calls.filter((c) => c.ended_s == null);
  const written = store.writtenPerSecond(model);
  useTick(1000, open.length > 0 || written > 0);
  const waiting = open.filter((c) => c.phase === "queued").length;
  const reading = open.filter((c) => c.phase === "reading").length;
  const { prompt, cached, saved, why } = reuse(model, calls);
  const figures = [
    ["Reused", prompt ? percent(cached / prompt) : "–", why || (prompt ? `${count(cached)} of ${count(prompt)} prompt tokens` : "of the prompts' tokens")],
    ["Time saved", !prompt || saved == null ? "–" : seconds(saved), "of computing, since the start"],
    ["Running", count(open.length - waiting), [waiting && `${count(waiting)} waiting`, reading && `${count(reading)} reading`].filter(Boolean).join(", ") || (open.length ? "writing" : "idle")],
    ["Writing", rate(written), "tokens per second"],
  ];
  return html`<dl class="headline">${figures.map(([name, value, text]) => html`<div key=${name}><dt>${name}</dt><dd><b>${value}</b><small>${text}</small></dd></div>`)}</dl>`;
}

/** What the caches count since the start; until they have said it, what is known of the requests. */
function reuse(model, calls) {
  const states = [...store.states.values()].filter((s) => !model || s.model === model);
  const caches = states.map((s) => s.cache).filter((c) => c?.tokens);
  const sum = (items, of) => items.reduce((n, item) => n + of(item), 0);
  if (caches.length) {
    return { prompt: sum(caches, (c) => c.tokens.prompt), cached: sum(caches, (c) => c.tokens.cached), saved: sum(caches, (c) => c.seconds_saved) };
  }
  if (states.some((s) => s.cache?.enabled === false)) return { prompt: 0, why: "reuse is off" };
  const settled = calls.filter((c) => c.admitted_s != null);
  return { prompt: sum(settled, (c) => c.prompt_tokens), cached: sum(settled, (c) => c.cached_tokens) };
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
