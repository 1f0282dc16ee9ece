// The tiers: how full each is and what it did; and what the device's memory is used for.

import { html } from "./vendor/htm-preact.js";
import { bytes, count, percent } from "./format.js";
import { Empty, Panel, Stack, Table } from "./components.js";
import { tierClass, tierName } from "./calls.js";

export function Tiers({ state }) {
  const cache = state?.cache;
  return html`<${Panel} id="tiers" title="Tiers" note=${state ? state.model : ""}>
    ${!cache && html`<${Empty}>What the cache holds in memory and on the SSD will be shown here, once a model is loaded.<//>`}
    ${cache && !cache.enabled && html`<${Empty}>Reuse is off${cache.why ? `: ${cache.why}` : ""}. Every prompt is computed anew.<//>`}
    ${cache?.enabled && cache.tiers.map((name) => html`<${Tier} key=${name} name=${name} cache=${cache} />`)}
    ${cache?.enabled && cache.tiers.length === 1 && html`<p class="hint">There is no tier below memory: what is evicted there is computed again.</p>`}
    ${cache?.enabled && html`<${Table} caption="Lookups by outcome" head=${["outcome", "lookups"]} rows=${() => outcomes(cache)} />`}
  <//>`;
}

function Tier({ name, cache }) {
  const tier = cache[name];
  const folder = tier.folder;
  const used = folder ? folder.bytes : counted(tier);
  const limit = folder ? folder.limit_bytes : tier.limit_bytes;
  const from = cache.tokens.by_tier[name] ?? 0;
  const css = tierClass(name);
  const parts = folder ? [[css, "this model", tier.used_bytes], ["others", "others that share it", Math.max(used - tier.used_bytes, 0)]] : [[css, "used", used]];
  const facts = [["records", count(tier.records)], ["hit rate", `${percent(cache.tokens.prompt ? from / cache.tokens.prompt : null)} of prompt tokens`]];
  if (tier.live?.bytes) facts.push(["in running requests", bytes(tier.live.bytes)]);
  if (tier.pinned_bytes) facts.push(["pinned", bytes(tier.pinned_bytes)]);
  if (tier.leaving_bytes) facts.push(["being written below", bytes(tier.leaving_bytes)]);
  if (folder) {
    const n = folder.counts;
    facts.push(["read", `${count(n.reads ?? 0)} · ${bytes(n.bytes_read ?? 0)}`], ["written", `${count(n.writes ?? 0)} · ${bytes(n.bytes_written ?? 0)}`]);
    if (n.evictions) facts.push(["evicted", count(n.evictions)]);
  }
  return html`<div class="tier">
    <h3>${name === "memory" ? "Memory" : name === "ssd" ? "SSD" : tierName(name)} <small>${bytes(used)}${limit ? ` of ${bytes(limit)}` : ""}</small></h3>
    ${limit > 0 && html`<${Stack} label=${tierName(name)} whole=${limit} parts=${parts} format=${bytes} />`}
    ${folder?.state === "paused" && html`<p class="warn">Writing pauses: ${folder.reason}</p>`}
    <dl class="facts small">${facts.map(([k, v]) => html`<div key=${k}><dt>${k}</dt><dd>${v}</dd></div>`)}</dl>
    ${folder?.day_bytes != null && html`<p class="wear">Wear in 24 hours: <b>${bytes(folder.day_bytes)}</b>
      ${folder.day_limit_bytes ? ` of ${bytes(folder.day_limit_bytes)} that may be written` : ", no limit is set"}</p>
      ${folder.day_limit_bytes > 0 && html`<${Stack} label="written in 24 hours" whole=${folder.day_limit_bytes} parts=${[["wearing", "written", folder.day_bytes]]} format=${bytes} />`}`}
  </div>`;
}

/** What counts against memory's limit: records that lie in live rows are in their requests' memory. */
function counted(tier) {
  return Math.max(tier.used_bytes - (tier.live?.bytes ?? 0), 0);
}

function outcomes(cache) {
  const named = [["hit", cache.hits], ["miss", cache.misses], ["less than all", cache.shortfalls]];
  return named.flatMap(([kind, by]) => Object.entries(by).map(([name, n]) => ({ key: kind + name, cells: [`${kind}: ${name}`, count(n)] })));
}

/** What the device's memory is for. Live requests are what admission has set aside for them. */
export function Memory({ state }) {
  const parts = state && memoryParts(state);
  return html`<${Panel} id="memory" title="Memory" note=${parts ? `${bytes(parts.reduce((n, [, , x]) => n + x, 0))} may be used` : ""}>
    ${!state && html`<${Empty}>Weights, live requests, records and what is free will be shown here, once a model is loaded.<//>`}
    ${state && !parts && html`<${Empty}>Only the operator sees how full the machine is: it would reveal what others do.<//>`}
    ${parts && html`<${Stack} label="Memory" parts=${parts} format=${bytes} />
      <dl class="facts small keyed">${parts.map(([css, name, n]) => html`<div key=${name}><dt><span class="swatch ${css}" aria-hidden="true"></span>${name}</dt><dd>${bytes(n)}</dd></div>`)}</dl>
      <p class="hint">MLX holds ${bytes(state.mlx_bytes?.active)} now, and keeps ${bytes(state.mlx_bytes?.cached)} of freed buffers to use again.</p>`}
  <//>`;
}

export function memoryParts(state) {
  const room = state.cache?.admission;
  if (state.weights_bytes == null || !room) return null;
  const memory = state.cache.memory;
  const used = memory ? counted(memory) : 0;
  const parked = memory?.parked?.bytes ?? 0;
  return [
    ["weights", "weights", state.weights_bytes],
    ["live", "live requests", room.held_bytes],
    ["parked", "parked rows", parked],
    ["memory", "records", Math.max(used - parked, 0)],
    ["free", "free", Math.max(room.capacity_bytes - room.held_bytes - Math.max(used, parked), 0)],
  ];
}
