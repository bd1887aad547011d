"use strict";

// words returns the words of a query, in lower case.
function words(query) {
  return query.toLowerCase().split(/[^a-z0-9._-]+/).filter((word) => word.length > 0);
}

// score rates an entry of the index for the words of a query. An entry must contain all of them: 0 means that it does not.
function score(entry, query) {
  const places = [[entry.page, 8], [entry.heading || "", 12], [entry.text, 1]];
  let total = 0;
  for (const word of query) {
    let best = 0;
    for (const [text, weight] of places) {
      const at = text.toLowerCase().indexOf(word);
      if (at < 0) continue;
      const start = at === 0 || !/[a-z0-9]/.test(text.toLowerCase()[at - 1]);
      best += weight * (start ? 2 : 1);
    }
    if (best === 0) return 0;
    total += best;
  }
  // The start of a page comes before its sections.
  return entry.heading ? total : total * 1.5;
}

// find returns the best entries for a query, at most limit.
function find(index, query, limit) {
  const all = words(query);
  if (all.length === 0) return [];
  return index
    .map((entry, position) => ({ entry, position, score: score(entry, all) }))
    .filter((result) => result.score > 0)
    .sort((a, b) => b.score - a.score || a.position - b.position)
    .slice(0, limit)
    .map((result) => result.entry);
}

// excerpt returns the part of a text around the first word of a query.
function excerpt(text, query) {
  const at = Math.max(0, Math.min(...words(query).map((word) => {
    const found = text.toLowerCase().indexOf(word);
    return found < 0 ? text.length : found;
  })));
  const start = at === text.length ? 0 : Math.max(0, at - 60);
  return (start > 0 ? "… " : "") + text.slice(start, start + 180) + (start + 180 < text.length ? " …" : "");
}

function startSearch(root) {
  const query = document.getElementById("query");
  const results = document.getElementById("results");
  const list = document.getElementById("found");
  const count = document.getElementById("count");
  let loading = false;

  // load reads the index when it is needed for the first time.
  function load() {
    if (loading) return;
    loading = true;
    const script = document.createElement("script");
    script.src = root + "search-index.js";
    script.onload = show;
    script.onerror = () => { loading = false; };
    document.head.append(script);
  }

  function show() {
    const empty = words(query.value).length === 0;
    results.hidden = empty;
    list.replaceChildren();
    if (empty || !window.searchIndex) {
      count.textContent = empty ? "" : "The index is being loaded.";
      return;
    }
    const found = find(window.searchIndex, query.value, 20);
    count.textContent = found.length === 0 ? "Nothing was found." : found.length + (found.length === 1 ? " result" : " results");
    for (const entry of found) {
      const link = document.createElement("a");
      link.href = root + entry.url;
      link.textContent = entry.heading ? entry.page + ": " + entry.heading : entry.page;
      const text = document.createElement("p");
      text.textContent = excerpt(entry.text, query.value);
      const item = document.createElement("li");
      item.append(link, text);
      list.append(item);
    }
  }

  function close() {
    query.value = "";
    show();
    query.focus();
  }

  // move focuses the next or the previous result.
  function move(step) {
    const links = [...list.querySelectorAll("a")];
    const next = links.indexOf(document.activeElement) + step;
    if (next < 0) query.focus();
    else if (next < links.length) links[next].focus();
  }

  query.addEventListener("focus", load);
  query.addEventListener("input", () => { load(); show(); });
  list.addEventListener("click", () => { results.hidden = true; });
  document.getElementById("search").addEventListener("submit", (event) => {
    event.preventDefault();
    const first = list.querySelector("a");
    if (first) first.click();
  });
  document.addEventListener("keydown", (event) => {
    const inSearch = event.target === query || results.contains(event.target);
    if (event.key === "/" && !/^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) {
      event.preventDefault();
      query.focus();
    } else if (inSearch && event.key === "Escape") {
      close();
    } else if (inSearch && (event.key === "ArrowDown" || event.key === "ArrowUp")) {
      event.preventDefault();
      move(event.key === "ArrowDown" ? 1 : -1);
    }
  });
  // On a phone, the list of documents is closed until it is needed.
  if (window.matchMedia("(max-width: 50rem)").matches) document.getElementById("menu").open = false;
}

if (typeof document !== "undefined") startSearch(document.currentScript.dataset.root);
