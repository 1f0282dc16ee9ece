// What is served and where, and how to connect a client or an agent to it.

import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { bytes, count } from "./format.js";
import { Announcement } from "./components.js";
import { json, key } from "./server.js";

const COPIED_MS = 2000;

/** The server's address as this browser reaches it, also behind a proxy. */
const server = new URL(".", document.baseURI).href.replace(/\/$/, "");
const api = `${server}/v1`;

export function Connect({ store, model }) {
  const [chosen, setChosen] = useState("");
  const known = store.models.find((m) => m.id === model);
  const choose = (name) => setChosen(name === chosen ? "" : name);
  const agents = useAgents(chosen, known);
  const settings = { curl: curl(known), python: python(known) }[chosen] ?? agents.find((a) => a.id === chosen);
  const names = [["curl", "curl"], ["python", "Python"], ...agents.map((a) => [a.id, a.title])];
  return html`<section class="panel wide connect" aria-labelledby="serves">
    <div class="serves">
      <div><h2 id="serves">${known ? known.id : "firn"}</h2><p class="note">${known ? facts(known) : store.status === "live" ? "No model is served yet." : "…"}</p></div>
      <div class="address"><span class="note" id="address">API address</span> <code aria-labelledby="address">${api}</code> <${Copy} text=${api} what="the API address" /></div>
    </div>
    <div class="clients" role="group" aria-label="Connect a client">
      <span class="note">Connect</span>
      ${names.map(([id, title]) => html`<button key=${id} aria-expanded=${id === chosen} aria-controls="settings" onClick=${() => choose(id)}>${title}</button>`)}
    </div>
    <div id="settings" hidden=${!settings}>${settings && html`<p class="note">${settings.where} <${Copy} text=${settings.settings} what="these settings" /></p>
      <pre tabindex="0">${settings.settings}</pre>`}</div>
  </section>`;
}

function facts(m) {
  const known = [
    m.state && m.state !== "loaded" ? m.state : "",
    m.context_length ? `context of ${count(m.context_length)} tokens` : "",
    m.bytes ? bytes(m.bytes) : "",
    m.vision ? "sees pictures" : "",
    m.capabilities?.includes("tools") ? "calls tools" : "",
  ];
  return known.filter(Boolean).join(" · ");
}

/** The server renders the settings of agents: they are those that `firn agents` prints. */
function useAgents(chosen, known) {
  const [agents, setAgents] = useState([]);
  useEffect(() => {
    if (!known) return undefined;
    const abort = new AbortController();
    const query = new URLSearchParams({ model: known.id, url: server });
    json(`v1/agents?${query}`, { signal: abort.signal }).then((answer) => setAgents(answer.agents.map(told)), () => setAgents([]));
    return () => abort.abort();
  }, [known?.id, known?.context_length]);
  return agents;
}

function told(agent) {
  return { ...agent, where: `${agent.where[0].toUpperCase()}${agent.where.slice(1)}.` };
}

function curl(known) {
  const auth = key.get() ? ` -H "authorization: Bearer $FIRN_API_KEY"` : "";
  const body = JSON.stringify({ model: known?.id ?? "", messages: [{ role: "user", content: "Hello!" }] }).replaceAll("'", "'\\''");
  return {
    where: "Run this in a terminal.",
    settings: `curl ${api}/chat/completions -H 'content-type: application/json'${auth} -d '${body}'`,
  };
}

function python(known) {
  const secret = key.get() ? `os.environ["FIRN_API_KEY"]` : `"none"`;
  return {
    where: "Needs pip install openai.",
    settings: `${key.get() ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(api)}, api_key=${secret})
reply = client.chat.completions.create(
    model=${JSON.stringify(known?.id ?? "")}, messages=[{"role": "user", "content": "Hello!"}]
)
print(reply.choices[0].message.content)`,
  };
}

function Copy({ text, what }) {
  const [done, setDone] = useState(false);
  const field = useRef(null);
  useEffect(() => {
    if (!done) return undefined;
    const timer = setTimeout(() => setDone(false), COPIED_MS);
    return () => clearTimeout(timer);
  }, [done]);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      // Browsers keep the clipboard from pages that came over plain HTTP from another machine.
      field.current.value = text;
      field.current.select();
      document.execCommand("copy");
    }
    setDone(true);
  };
  return html`<button class="copy" aria-label="Copy ${what}" onClick=${copy}>${done ? "Copied" : "Copy"}</button>
    <textarea class="unseen" ref=${field} tabindex="-1" aria-hidden="true" readonly></textarea>
    <${Announcement}>${done ? "Copied" : ""}<//>`;
}
