"use strict";
(() => {
  // A row is shown if it has all words and every chosen value.
  const words = document.getElementById("words");
  const choices = [...document.querySelectorAll("[data-filter]")];
  const rows = [...document.querySelectorAll(".board tbody tr")];
  const status = document.getElementById("shown");
  const show = () => {
    const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !(wanted.every((word) => text.includes(word))
        && choices.every((choice) => choice.value === "" || row.dataset[choice.dataset.filter] === choice.value));
      shown += row.hidden ? 0 : 1;
    }
    for (const section of document.querySelectorAll("section:has(.board)")) {
      section.hidden = [...section.querySelectorAll("tbody tr")].every((row) => row.hidden);
    }
    status.textContent = shown === rows.length ? "" : `${shown} of ${rows.length} arms shown`;
  };
  words.addEventListener("input", show);
  for (const choice of choices) choice.addEventListener("change", show);
})();
