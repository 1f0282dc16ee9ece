// What every panel is made of.

import { html, useEffect, useLayoutEffect, useState } from "./vendor/htm-preact.js";

/** A panel with a heading, and on the right of it what may be chosen. */
export function Panel({ id, title, note, tools, wide, children }) {
  return html`<section class="panel ${wide ? "wide" : ""}" id=${id} aria-labelledby="${id}-title">
    <header>
      <h2 id="${id}-title">${title}</h2>
      ${note && html`<p class="note">${note}</p>`}
      ${tools && html`<div class="tools">${tools}</div>`}
    </header>
    ${children}
  </section>`;
}

export function Empty({ children }) {
  return html`<p class="empty">${children}</p>`;
}

export function Legend({ title, items }) {
  return html`<ul class="legend" aria-label=${title ?? "Legend"}>
    ${title && html`<li>${title}</li>`}
    ${items.map(([name, text]) => html`<li key=${text}><span class="swatch ${name}" aria-hidden="true"></span>${text}</li>`)}
  </ul>`;
}

/** The numbers of a chart, for those who cannot see it or would rather read. `rows` is called when it is open. */
export function Table({ caption, head, rows }) {
  const [open, setOpen] = useState(false);
  return html`<details class="astable" onToggle=${(e) => setOpen(e.target.open)}>
    <summary>As a table<span class="unseen">: ${caption}</span></summary>
    ${open && html`<div class="scroll" tabindex="0" role="group" aria-label=${caption}>
      <table>
        <caption>${caption}</caption>
        <thead><tr>${head.map((cell) => html`<th scope="col">${cell}</th>`)}</tr></thead>
        <tbody>
          ${rows().map(({ key, cells }) => html`<tr key=${key}>
            ${cells.map((cell, i) => (i ? html`<td>${cell}</td>` : html`<th scope="row">${cell}</th>`))}
          </tr>`)}
        </tbody>
      </table>
    </div>`}
  </details>`;
}

/** Parts of a whole, one behind the other: [class, text, value], and what the whole is. */
export function Stack({ parts, whole, label, format }) {
  const total = Math.max(whole ?? 0, parts.reduce((sum, [, , n]) => sum + n, 0), 1);
  const text = parts.map(([, name, n]) => `${name} ${format(n)}`).join(", ");
  let x = 0;
  return html`<svg class="stack" role="img" aria-label="${label}: ${text}" viewBox="0 0 1000 10" preserveAspectRatio="none">
    <rect class="ground" width="1000" height="10" />
    ${parts.map(([name, title, n], i) => {
      const at = x;
      x += (n / total) * 1000;
      return html`<rect key=${i} class="fill ${name}" x=${at} width=${Math.max(x - at, 0)} height="10"><title>${title} ${format(n)}</title></rect>`;
    })}
  </svg>`;
}

/** The width of an element, kept up to date. */
export function useWidth() {
  const [element, ref] = useState(null);
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    if (!element) return undefined;
    const observer = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    observer.observe(element);
    return () => observer.disconnect();
  }, [element]);
  return [ref, width];
}

/** Renders again every `ms` while `active` and while the page is visible. */
export function useTick(ms, active) {
  const [, setTick] = useState(0);
  useEffect(() => {
    if (!active) return undefined;
    const timer = setInterval(() => {
      if (document.visibilityState === "visible") setTick((n) => n + 1);
    }, ms);
    return () => clearInterval(timer);
  }, [ms, active]);
}

/** For screen readers only: what has just changed. */
export function Announcement({ children }) {
  return html`<p class="unseen" role="status">${children}</p>`;
}
