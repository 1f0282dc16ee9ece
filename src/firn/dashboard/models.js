// Models and their states; loaded and unloaded by a button where there are several.

import { html, useState } from "./vendor/htm-preact.js";
import { bytes, count } from "./format.js";
import { Empty, Panel, Announcement } from "./components.js";
import { ask } from "./server.js";

export function Models({ store }) {
  const [busy, setBusy] = useState({});
  const [message, setMessage] = useState("");
  const loaded = store.models.filter((m) => m.state === "loaded").length;
  const act = async (id, action) => {
    setBusy((b) => ({ ...b, [id]: action }));
    setMessage(`${action === "load" ? "Loading" : "Unloading"} ${id} …`);
    try {
      await ask(`v1/models/${id.split("/").map(encodeURIComponent).join("/")}/${action}`, { method: "POST" });
      setMessage(`${id} is ${action}ed.`);
    } catch (error) {
      setMessage(error.message);
    }
    setBusy((b) => ({ ...b, [id]: undefined }));
  };
  return html`<${Panel} id="models" title="Models" note=${store.several ? `${count(loaded)} of ${count(store.models.length)} loaded, each in a process of its own` : ""}>
    ${store.models.length === 0 && html`<${Empty}>The models of this server will be listed here.<//>`}
    <ul class="models" tabindex=${store.models.length > 6 ? 0 : -1}>
      ${store.models.map((m) => html`<li key=${m.id}>
        <span class="state ${m.state ?? "loaded"}">${m.state ?? "loaded"}</span>
        <span class="name"><b>${m.id}</b> <small>${details(m)}</small>${m.error && html`<small class="warn">${m.error}</small>`}</span>
        ${store.several && html`<span class="actions">
          ${m.state === "loaded"
            ? html`<button disabled=${busy[m.id]} aria-label="Unload ${m.id}" onClick=${() => act(m.id, "unload")}>Unload</button>`
            : html`<button disabled=${busy[m.id] || m.state !== "unloaded"} aria-label="Load ${m.id}" onClick=${() => act(m.id, "load")}>Load</button>`}
        </span>`}
      </li>`)}
    </ul>
    ${!store.several && store.models.length > 0 && html`<p class="hint">One model is served: it is loaded as long as the server runs.</p>`}
    ${message && html`<p class="message">${message}</p>`}
    <${Announcement}>${message}<//>
  <//>`;
}

function details(m) {
  const facts = [m.architecture, bytes(m.bytes)];
  if (m.context_length) facts.push(`${count(m.context_length)} tokens`);
  if (m.active) facts.push(`${count(m.active)} under way`);
  if (m.waiting) facts.push(`${count(m.waiting)} waiting`);
  if (m.pinned) facts.push("pinned");
  return facts.filter(Boolean).join(" · ");
}
