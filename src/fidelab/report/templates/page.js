"use strict";
(() => {
  const root = document.documentElement;
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const byId = (id) => document.getElementById(id);
  root.classList.add("js");

  // Colours: the system's until the button is pressed.
  const theme = byId("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const nameTheme = () => { theme.ariaLabel = theme.title = isDark() ? "Light colours" : "Dark colours"; };
  theme.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    nameTheme();
  });
  system.addEventListener("change", nameTheme);
  nameTheme();

  // Tables sort by a heading: rising, falling, as they were. Cells without a number stay last.
  const words = (cell) => [...cell.childNodes].filter((node) => node.nodeName !== "SMALL").map((node) => node.textContent);
  const textOf = (cell) => (cell.dataset.value ?? words(cell).join("")).trim();
  const numberOf = (text) => {
    const plain = text.replace(/\u2212/g, "-").replace(/[\u2265\u2264\u2248<>+,\s]/g, "");
    return /^-?\d+(\.\d+)?(e-?\d+)?/i.test(plain) ? parseFloat(plain) : null;
  };
  const compare = (a, b) => (typeof a === "number" ? a - b : a.localeCompare(b, undefined, { numeric: true }));
  const sort = (table, column, way) => {
    const rows = all("tbody > tr", table);
    const texts = rows.map((row) => textOf(row.cells[column]));
    const isAbsent = (text) => text === "" || text === "\u2013";
    const numeric = column > 0 && texts.every((text) => isAbsent(text) || numberOf(text) !== null);
    const keys = new Map(rows.map((row, n) => [row, numeric ? numberOf(texts[n]) : texts[n]]));
    const absent = new Map(rows.map((row, n) => [row, isAbsent(texts[n])]));
    rows.sort((a, b) => {
      if (way === 0) return a.dataset.place - b.dataset.place;
      if (absent.get(a) || absent.get(b)) return absent.get(a) - absent.get(b);
      return way * compare(keys.get(a), keys.get(b)) || a.dataset.place - b.dataset.place;
    });
    table.tBodies[0].append(...rows);
  };
  for (const table of all("table.sortable")) {
    all("tbody > tr", table).forEach((row, n) => { row.dataset.place = n; });
    const heads = all("thead th", table);
    heads.forEach((head, column) => {
      head.querySelector("button").addEventListener("click", () => {
        const next = { none: "ascending", ascending: "descending", descending: "none" }[head.ariaSort ?? "none"];
        heads.forEach((other) => { other.ariaSort = other === head ? next : "none"; });
        sort(table, column, { ascending: 1, descending: -1, none: 0 }[next]);
      });
    });
  }

  // Commands are copied in one piece.
  for (const copy of all("button.copy")) {
    copy.addEventListener("click", async () => {
      const source = byId(copy.dataset.copy);
      let done = true;
      try {
        await navigator.clipboard.writeText(source.textContent);
      } catch {
        getSelection().selectAllChildren(source);
        done = document.execCommand("copy");
      }
      copy.textContent = done ? "Copied" : "Press Ctrl+C";
      setTimeout(() => { copy.textContent = "Copy"; }, 2000);
    });
  }

  // Paper has no buttons: everything is open while printing.
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = all("details:not([open]):not(#raw)");
    for (const part of closed) part.open = true;
  });
  addEventListener("afterprint", () => {
    for (const part of closed) part.open = false;
  });
})();
