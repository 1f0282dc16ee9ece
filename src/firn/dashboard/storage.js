// Where prefixes are kept, how full each place is and what it did; and what memory is used for.

import { html } from "./vendor/htm-preact.js";
import { bytes, count, percent } from "./format.js";
import { Empty, Panel, Stack, Table } from "./components.js";
import { tierClass, tierName } from "./calls.js";

export function Storage({ state }) {
  const cache = state?.cache;
  return html`<${Panel} id="storage" title="Memory and storage" note=${state ? state.model : ""}>
    ${!state && html`<${Empty}>What the model and its prefixes occupy will be shown here, once a model is loaded.<//>`}
    ${state && html`<${Memory} state=${state} />`}
    ${state && !cache && html`<${Empty}>The model is busy with one long step. What is stored will be shown when it ends.<//>`}
    ${cache && !cache.enabled && html`<${Empty}>Reuse is off${cache.why ? `: ${cache.why}` : ""}. Every prompt is computed anew.<//>`}
    ${cache?.enabled && cache.tiers.map((name) => html`<${Tier} key=${name} name=${name} cache=${cache} />`)}
    ${cache?.enabled && cache.tiers.length === 1 && html`<p class="hint">Prefixes are kept in memory only: what has to give way there is computed again.</p>`}
    ${cache?.enabled && html`<${Table} caption="Lookups by outcome" head=${["outcome", "lookups"]} rows=${() => outcomes(cache)} />`}
  <//>`;
}

/** What the device's memory is for. Running requests have what admission has set aside for them. */
function Memory({ state }) {
  const parts = memoryParts(state);
  if (!parts) return state.operator ? null : html`<p class="hint">Only the operator sees how full the machine is: it would reveal what others do.</p>`;
  const whole = parts.reduce((n, [, , x]) => n + x, 0);
  return html`<div class="tier" id="memory">
    <h3>All memory <small>${bytes(whole)} may be used</small></h3>
    <${Stack} label="Memory" parts=${parts} format=${bytes} />
    <dl class="facts small keyed">${parts.map(([css, name, n]) => html`<div key=${name}><dt><span class="swatch ${css}" aria-hidden="true"></span>${name}</dt><dd>${bytes(n)}</dd></div>`)}</dl>
  </div>`;
}

function Tier({ name, cache }) {
  const tier = cache[name];
  const folder = tier.folder;
  const used = folder ? folder.bytes : occupied(tier);
  const limit = folder ? folder.limit_bytes : tier.limit_bytes;
  const from = cache.tokens.by_tier[name] ?? 0;
  const css = tierClass(name);
  const parts = folder ? [[css, "this model", tier.used_bytes], ["others", "others that share it", Math.max(used - tier.used_bytes, 0)]] : [[css, "used", used]];
  const facts = [["records", count(tier.records)], ["gave", `${percent(cache.tokens.prompt ? from / cache.tokens.prompt : null)} of prompt tokens`]];
  if (tier.live?.bytes) facts.push(["in running requests", bytes(tier.live.bytes)]);
  if (tier.pinned_bytes) facts.push(["pinned", bytes(tier.pinned_bytes)]);
  if (tier.leaving_bytes) facts.push(["being written", bytes(tier.leaving_bytes)]);
  if (folder) {
    const n = folder.counts;
    facts.push(["read", bytes(n.bytes_read ?? 0)], ["written", bytes(n.bytes_written ?? 0)]);
    if (n.evictions) facts.push(["evicted", count(n.evictions)]);
    if (folder.day_bytes != null) facts.push(["written in 24 hours", `${bytes(folder.day_bytes)}${folder.day_limit_bytes ? ` of ${bytes(folder.day_limit_bytes)}` : ""}`]);
  }
  return html`<div class="tier">
    <h3>Prefixes ${name === "memory" ? "in memory" : `on ${tierName(name)}`} <small>${bytes(used)}${limit ? ` of ${bytes(limit)}` : ""}</small></h3>
    ${limit > 0 && html`<${Stack} label=${tierName(name)} whole=${limit} parts=${parts} format=${bytes} />`}
    ${folder?.state === "paused" && html`<p class="warn">Writing pauses: ${folder.reason}</p>`}
    <dl class="facts small">${facts.map(([k, v]) => html`<div key=${k}><dt>${k}</dt><dd>${v}</dd></div>`)}</dl>
  </div>`;
}

/** What prefixes take up in memory: the records, and where those that ended as rows lie in a buffer, all of
 *  it. What lies in the row of a running request is that request's. */
function occupied(tier) {
  return Math.max(tier.used_bytes - (tier.live?.bytes ?? 0), tier.parked?.bytes ?? 0);
}

function outcomes(cache) {
  const named = [["hit", cache.hits], ["miss", cache.misses], ["less than all", cache.shortfalls]];
  return named.flatMap(([kind, by]) => Object.entries(by).map(([name, n]) => ({ key: kind + name, cells: [`${kind}: ${name}`, count(n)] })));
}

export function memoryParts(state) {
  const room = state.cache?.admission;
  if (state.weights_bytes == null || !room) return null;
  const stored = state.cache.memory ? occupied(state.cache.memory) : 0;
  return [
    ["weights", "weights", state.weights_bytes],
    ["live", "running requests", room.held_bytes],
    ["memory", "prefixes", stored],
    ["free", "free", Math.max(room.capacity_bytes - room.held_bytes - stored, 0)],
  ];
}
