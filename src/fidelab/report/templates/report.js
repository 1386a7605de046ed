"use strict";
(() => {
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const byId = (id) => document.getElementById(id);

  // One arm stands out in all plots while its name has the focus or the pointer; a press holds it.
  const marks = all("svg [data-arm]");
  const names = all("button[data-arm]");
  let held = null;
  const show = (arm) => {
    for (const mark of marks) mark.classList.toggle("faint", arm !== null && mark.dataset.arm !== arm);
    for (const name of names) name.ariaPressed = String(name.dataset.arm === held);
  };
  for (const name of names) {
    const arm = name.dataset.arm;
    for (const event of ["mouseenter", "focus"]) name.addEventListener(event, () => show(arm));
    for (const event of ["mouseleave", "blur"]) name.addEventListener(event, () => show(held));
    name.addEventListener("click", () => {
      held = held === arm ? null : arm;
      show(held ?? arm);
    });
  }
  for (const mark of marks) {
    mark.addEventListener("mouseenter", () => show(mark.dataset.arm));
    mark.addEventListener("mouseleave", () => show(held));
  }
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    held = null;
    show(null);
  });

  // The record, written out when it is opened.
  const record = byId("fidelab-report").textContent;
  const raw = byId("raw");
  raw.addEventListener("toggle", () => {
    if (raw.open) byId("json").textContent = JSON.stringify(JSON.parse(record), null, 2);
  });
  byId("download").addEventListener("click", () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([record], { type: "application/json" }));
    link.download = "report.json";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
})();
