// The page of `capstan dashboard`. All texts come from the objects of tenants: they are inserted as text only. The
// Content-Security-Policy of the page also refuses every conversion of a text to HTML or code.
'use strict';

const $ = (id) => document.getElementById(id);
const SVG = 'http://www.w3.org/2000/svg';
const healthNames = { ok: 'well', working: 'in progress', attention: 'needs attention', paused: 'paused', unknown: 'unknown' };
const order = ['attention', 'working', 'paused', 'unknown', 'ok'];

// The last state of each section, as the server sent it.
const state = { access: [] };
let query = '';

// ---- elements -------------------------------------------------------------------------------------------------------

// h creates an element. Children are elements, texts, or lists of them; null and false are left out.
function h(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? '' : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false && child !== '') node.append(child);
  }
  return node;
}

// text keeps the direction of foreign text from its surroundings.
const text = (value, kind) => h('bdi', { class: kind }, value);

function icon(name, label) {
  const svg = document.createElementNS(SVG, 'svg');
  svg.setAttribute('class', 'icon ' + name);
  svg.setAttribute('aria-hidden', 'true');
  const use = document.createElementNS(SVG, 'use');
  use.setAttribute('href', '#i-' + name);
  svg.append(use);
  return label ? [svg, h('span', { class: 'hidden' }, label)] : svg;
}

const health = (value) => icon(value, healthNames[value]);

// since shows the time since then, and is updated as it passes.
function since(at) {
  if (!at) return null;
  return h('time', { datetime: at, title: new Date(at).toLocaleString() }, age(at));
}

function age(at) {
  const seconds = Math.max(0, (Date.now() - Date.parse(at)) / 1000);
  if (seconds < 90) return Math.floor(seconds) + 's';
  if (seconds < 90 * 60) return Math.floor(seconds / 60) + 'm';
  if (seconds < 36 * 3600) return Math.floor(seconds / 3600) + 'h';
  return Math.floor(seconds / 86400) + 'd';
}

// morph changes a tree into another one and keeps what is equal, so that focus, selection and open parts stay.
function morph(from, to) {
  if (from.nodeType === Node.TEXT_NODE) {
    if (from.data !== to.data) from.data = to.data;
    return;
  }
  for (const { name } of [...from.attributes]) {
    if (!to.hasAttribute(name) && name !== 'open') from.removeAttribute(name);
  }
  for (const { name, value } of [...to.attributes]) {
    if (name === 'open' || (name === 'tabindex' && from.hasAttribute('tabindex'))) continue; // belong to the user
    if (from.getAttribute(name) !== value) from.setAttribute(name, value);
  }
  morphChildren(from, [...to.childNodes]);
}

function morphChildren(parent, wanted) {
  const keyed = new Map();
  for (const child of parent.childNodes) if (child.dataset && child.dataset.key) keyed.set(child.dataset.key, child);
  let at = parent.firstChild;
  for (const next of wanted) {
    const key = next.dataset && next.dataset.key;
    let same = key ? keyed.get(key) : at;
    if (same && (same.nodeType !== next.nodeType || same.nodeName !== next.nodeName || (!key && same.dataset && same.dataset.key))) same = null;
    if (!same) {
      parent.insertBefore(next, at);
      continue;
    }
    if (same === at) at = at.nextSibling;
    else parent.insertBefore(same, at);
    morph(same, next);
    keyed.delete(key);
  }
  while (at) {
    const gone = at;
    at = at.nextSibling;
    gone.remove();
  }
}

// fill shows the content of a section.
function fill(section, ...content) {
  const target = $(section).querySelector('.content');
  target.removeAttribute('aria-busy');
  morphChildren(target, content.flat(Infinity).filter(Boolean));
}

function heading(section, title, note) {
  morphChildren($(section + '-title'), [...h('h2', null, title, note ? h('span', { class: 'note' }, note) : null).childNodes]);
}

// ---- filter ---------------------------------------------------------------------------------------------------------

const matches = (...texts) => query === '' || texts.some((value) => value && String(value).toLowerCase().includes(query));

function noMatch(all, shown, what) {
  return all.length > 0 && shown.length === 0 ? h('p', { class: 'empty' }, 'No ' + what + ' matches ', text(query, 'name'), '.') : null;
}

// ---- what cannot be read --------------------------------------------------------------------------------------------

const kindsOf = {
  hosts: ['Hosts', 'Machines on hosts'],
  clusters: ['Clusters', 'Machines', 'Control planes', 'Machine deployments', 'Machine pools'],
  pools: ['IP pools', 'Global IP pools', 'IP addresses'],
  events: ['Events'],
};

const accessOf = (section) => state.access.filter((a) => kindsOf[section].includes(a.kind));
const reading = (section) => accessOf(section).some((a) => a.state === 'reading');

// notices tells what is missing in a section.
function notices(section) {
  const out = [];
  const list = (all) => all.map((a) => a.kind.toLowerCase().replace(/\bip\b/g, 'IP')).join(', ');
  const forbidden = accessOf(section).filter((a) => a.state === 'forbidden');
  if (forbidden.length) out.push(h('p', { class: 'notice' }, icon('lock'), h('span', null, 'Your rights do not include the list of ' + list(forbidden) + '. The rest is shown.')));
  const failed = accessOf(section).filter((a) => a.state === 'failed');
  if (failed.length) out.push(h('p', { class: 'notice attention' }, icon('attention'), h('span', null, 'The API does not answer for ' + list(failed) + '. The last known state is shown. ', text(failed[0].message, 'reason'))));
  for (const a of accessOf(section)) {
    if (a.cut && a.kind === 'Events') out.push(h('p', { class: 'notice' }, icon('cut'), 'The newest ' + a.shown + ' are shown. There are more.'));
    else if (a.cut) out.push(h('p', { class: 'notice' }, icon('cut'), 'There are more ' + list([a]) + ' than this page keeps: ' + a.shown + ' are shown. Restrict the page with --namespace.'));
  }
  return out;
}

// ---- sections -------------------------------------------------------------------------------------------------------

const draw = {};

draw.source = () => {
  const { server, namespace } = state.source;
  morphChildren($('source'), [...h('p', null, text(server.replace(/^https?:\/\//, '')), namespace ? [' · ', text(namespace)] : null).childNodes]);
};

draw.summary = () => {
  const s = state.summary;
  const well = (count, title, target) => tile(target, title, count.health, String(count.ok), count.all === 0 ? null : '/' + count.all);
  morphChildren($('summary'), [
    tile('waiting', s.attention ? 'waiting, ' + s.attention + ' need' + (s.attention === 1 ? 's' : '') + ' attention' : 'waiting', s.attention ? 'attention' : s.waiting ? 'working' : 'ok', String(s.waiting)),
    well(s.hosts, 'hosts well', 'hosts'),
    well(s.clusters, 'clusters well', 'clusters'),
    well(s.machines, 'machines well', 'clusters'),
    well(s.pools, 'pools well', 'pools'),
    tile('events', s.warnings === 1 ? 'recent warning' : 'recent warnings', null, String(s.warnings)),
  ]);
  document.title = (s.attention ? '(' + s.attention + ') ' : '') + 'Capstan';
};

function tile(target, label, mood, value, rest) {
  return h('a', { href: '#' + target, class: 'tile ' + (mood || ''), 'data-key': target + label.split(/[ ,]/)[0] },
    h('span', { class: 'value' }, mood ? icon(mood) : null, value, rest ? h('span', { class: 'rest' }, rest) : null),
    h('span', { class: 'label' }, label));
}

// short shows a large number as a power of two, or in thousands.
function short(number) {
  if (number.length <= 6) return number.replace(/\B(?=(\d{3})+$)/g, '\u2009');
  const n = BigInt(number);
  const bits = n.toString(2).length;
  if (number.length > 12) return '≈2' + [...String(n >= (3n << BigInt(bits - 2)) ? bits : bits - 1)].map((d) => '⁰¹²³⁴⁵⁶⁷⁸⁹'[d]).join('');
  return Number(n / 1000n > 999999n ? n / 1000000n : n / 1000n).toLocaleString('en') + (n / 1000n > 999999n ? 'M' : 'k');
}

draw.waiting = () => {
  const all = state.waiting.items;
  const shown = all.filter((o) => matches(o.name, o.namespace, o.kind, ...o.waits.flatMap((w) => [w.object, w.reason, w.message, w.condition])));
  const updates = (state.updates || []).filter((u) => matches(u.machine, u.cluster, u.namespace, u.group));
  heading('waiting', 'Waiting', all.length ? String(all.length + (state.waiting.cut || 0)) : null);
  const busy = state.access.some((a) => a.state === 'reading');
  fill('waiting',
    all.length === 0 && updates.length === 0 ? h('p', { class: 'empty' }, busy ? 'Reading…' : [icon('ok'), ' Nothing waits. Everything that you can read is as it should be.']) : null,
    noMatch(all, shown, 'entry'),
    shown.length ? h('ol', { class: 'waits', 'data-key': 'waits' }, shown.map(operation)) : null,
    state.waiting.cut ? h('p', { class: 'notice' }, icon('cut'), 'and ' + state.waiting.cut + ' more, which are less urgent') : null,
    updates.length ? h('ul', { class: 'updates', 'data-key': 'updates', 'aria-label': 'Updates in place' }, updates.map(update)) : null);
};

// operation shows the first wait in full, and the others in a part that can be opened.
function operation(o) {
  const [first, ...others] = o.waits;
  const more = others.length + (o.cut || 0);
  return h('li', { class: 'wait ' + o.health, 'data-key': o.id },
    health(o.health),
    h('div', { class: 'what' },
      h('p', { class: 'scope' }, goTo(o.id, (o.namespace ? o.namespace + '/' : '') + o.name, 'name'), h('span', { class: 'kind' }, o.kind), since(first.since)),
      wait(first, o),
      more ? h('details', { 'data-key': 'others' },
        h('summary', null, icon('chevron'), more === 1 ? '1 more' : more + ' more'),
        h('ul', null, others.map((w) => h('li', { 'data-key': w.object + w.condition }, icon(w.health, healthNames[w.health]), h('div', null, wait(w, o)), since(w.since)))),
        o.cut ? h('p', { class: 'notice' }, icon('cut'), 'and ' + o.cut + ' more') : null) : null));
}

function wait(w, o) {
  const own = w.object.split(' ')[1] === o.name;
  return [
    h('p', { class: 'line' }, own ? null : [text(w.object, 'object'), ' '], text(w.condition.replace(/=True$/, '').replace(/=(False|Unknown)$/, ' is $1'), 'condition'), w.reason ? [' ', text(w.reason, 'reason')] : null),
    w.message ? h('p', { class: 'message' }, text(w.message)) : null,
    w.do && !w.byItself ? h('p', { class: 'do' }, h('span', { 'aria-hidden': 'true' }, '→ '), code(w.do), w.see ? [' ', h('span', { class: 'see' }, w.see)] : null) : null,
  ];
}

// code shows parts between backticks as code.
function code(value) {
  return value.split('`').map((part, i) => (i % 2 ? h('code', null, part) : part));
}

// goTo is a button that shows an object of this page.
function goTo(key, label, kind) {
  return h('button', { type: 'button', class: 'go ' + (kind || ''), 'data-goto': key }, text(label));
}

function update(u) {
  return h('li', { class: 'update', 'data-key': u.namespace + '/' + u.machine },
    icon('working'),
    h('div', { class: 'what' },
      h('p', { class: 'line' }, 'Update of ', text(u.namespace + '/' + u.machine, 'name'), u.version ? [' to ', text(u.version)] : null, ' ', text(u.state, 'reason')),
      h('p', { class: 'message' }, text((u.group || 'worker') + ' of ' + u.cluster), u.step ? [' · step ', text(u.step)] : null, ' · ' + u.remaining + ' not up to date')),
    h('div', { class: 'where' }, since(u.since)));
}

draw.hosts = () => {
  const all = state.hosts;
  const shown = all.filter((x) => matches(x.name, x.address, x.domain, ...x.machines.map((m) => m.name), ...x.machines.map((m) => m.cluster), ...(x.notes || [])));
  heading('hosts', 'Hosts', all.length ? String(all.length) : null);
  const racks = new Map();
  for (const host of shown) {
    const domain = host.domain || '';
    if (!racks.has(domain)) racks.set(domain, []);
    racks.get(domain).push(host);
  }
  fill('hosts', notices('hosts'),
    all.length === 0 ? h('p', { class: 'empty' }, reading('hosts') ? 'Reading…' : ['No hosts. ', h('code', null, 'capstan host join'), ' adds one.']) : null,
    noMatch(all, shown, 'host'),
    racks.size ? h('div', { class: 'racks', 'data-key': 'racks' }, [...racks].map(([domain, hosts]) => rack(domain, hosts))) : null);
};

function rack(domain, hosts) {
  return h('div', { class: 'rack', 'data-key': 'rack ' + domain },
    h('h3', null, domain ? text(domain) : 'No failure domain', h('span', { class: 'note' }, hosts.length === 1 ? '1 host' : hosts.length + ' hosts')),
    h('ul', null, hosts.map(host)));
}

function host(x) {
  const facts = [x.address && text(x.address, 'mono'), x.software && text('capstand ' + x.software), x.versions && x.versions.length && text(x.versions.join(' '))].filter(Boolean);
  return h('li', { class: 'unit ' + x.health, 'data-key': x.id, id: 'object ' + x.id, tabindex: '-1' },
    h('div', { class: 'face' },
      h('p', { class: 'title' }, health(x.health), text(x.name, 'name'), (x.notes || []).map((note) => text(note, 'tag'))),
      facts.length ? h('p', { class: 'facts' }, facts.map((f) => h('span', null, f))) : null,
      x.derived ? h('p', { class: 'facts' }, 'You cannot read this host, only machines on it.') : null,
      x.waiting.length ? h('p', { class: 'why' }, text(x.waiting[0].message || x.waiting[0].reason || x.waiting[0].condition)) : null),
    x.resources.length ? h('dl', { class: 'meters' }, x.resources.map((r) => h('div', { class: 'meter' + (r.used >= 0.9 ? ' high' : '') },
      h('dt', null, r.name), h('dd', null, bar(r.used, r.name + ' used'), h('span', { class: 'numbers' }, r.free + ' free', h('span', { class: 'of' }, ' of ' + r.total)))))) : null,
    slots(x));
}

// bar is a meter. Its width is an attribute of an SVG, because the policy of the page permits no style in elements.
function bar(share, label, mood) {
  const svg = document.createElementNS(SVG, 'svg');
  const percent = Math.round(share * 100);
  for (const [name, value] of Object.entries({ class: 'fill ' + (mood || ''), viewBox: '0 0 100 6', preserveAspectRatio: 'none', role: 'img', 'aria-label': label + ': ' + percent + ' %' })) svg.setAttribute(name, value);
  for (const [kind, width] of [['track', 100], ['level', percent]]) {
    const rect = document.createElementNS(SVG, 'rect');
    for (const [name, value] of Object.entries({ class: kind, width, height: 6 })) rect.setAttribute(name, value);
    svg.append(rect);
  }
  return svg;
}

// slots are the machines of a host. One of them is in the order of the tabulator; arrows reach the others.
function slots(x) {
  if (!x.machines.length && !x.foreign) return h('p', { class: 'slots none' }, 'no machines');
  return h('div', { class: 'slots', role: 'group', 'aria-label': 'Machines on ' + x.name },
    x.machines.map((m, i) => h('button', {
      type: 'button', class: 'slot ' + m.health, 'data-key': m.id, 'data-goto': m.id, tabindex: i ? -1 : 0,
      title: m.namespace + '/' + m.name + (m.cluster ? ', cluster ' + m.cluster : ''),
      'aria-label': 'machine ' + m.name + ', cluster ' + m.namespace + '/' + m.cluster + ', ' + healthNames[m.health],
    }, icon(m.health), text(m.name))),
    x.foreign ? h('span', { class: 'slot foreign' }, '+ ' + x.foreign + ' that you cannot read') : null);
}

draw.clusters = () => {
  const all = state.clusters;
  const machines = (c) => c.groups.flatMap((g) => g.machines);
  const shown = all.filter((c) => matches(c.name, c.namespace, c.version, c.endpoint, ...machines(c).flatMap((m) => [m.name, m.node, m.host, m.address])));
  heading('clusters', 'Clusters', all.length ? String(all.length) : null);
  fill('clusters', notices('clusters'),
    all.length === 0 ? h('p', { class: 'empty' }, reading('clusters') ? 'Reading…' : ['No clusters. ', h('code', null, 'capstan create cluster NAME'), ' creates one.']) : null,
    noMatch(all, shown, 'cluster'),
    shown.map((c) => cluster(c, all.length <= 2 || c.health !== 'ok')));
};

function cluster(c, open) {
  const bad = c.conditions.filter((x) => !x.good).length;
  const members = c.groups.flatMap((g) => g.machines);
  return h('details', { class: 'cluster ' + c.health, 'data-key': c.id, id: 'object ' + c.id, open },
    h('summary', null, icon('chevron'), health(c.health),
      h('span', { class: 'identity' }, text(c.name, 'name'), text(c.namespace, 'namespace')),
      h('span', { class: 'facts' },
        c.phase ? text(c.phase) : null, c.version ? text(c.version, 'mono') : null, c.endpoint ? text(c.endpoint, 'mono') : null, c.class ? text('class ' + c.class) : null),
      h('span', { class: 'dots', 'aria-label': members.length + ' machines, ' + members.filter((m) => m.health === 'ok').length + ' well', role: 'img' },
        members.slice(0, 40).map((m) => icon(m.health)), members.length > 40 ? '+' + (members.length - 40) : null)),
    h('div', { class: 'topology' },
      c.groups.length ? c.groups.map(group) : h('p', { class: 'empty' }, 'No machines.'),
      c.conditions.length ? h('details', { class: 'conditions', 'data-key': 'conditions' },
        h('summary', null, icon('chevron'), 'Conditions', h('span', { class: 'note' }, bad ? bad + ' of ' + c.conditions.length + ' not as they should be' : 'all ' + c.conditions.length + ' as they should be')),
        h('ul', null, c.conditions.map((x) => h('li', { 'data-key': x.type, class: x.good ? 'good' : 'bad' },
          icon(x.good ? 'ok' : 'working', x.good ? 'as it should be' : 'not as it should be'),
          h('span', null, text(x.type, 'condition'), ' ', text(x.status), x.reason && x.reason !== x.type ? [' ', text(x.reason, 'reason')] : null, x.message ? h('span', { class: 'message' }, text(x.message.replace(/^\* /, ''))) : null),
          since(x.since))))) : null));
}

function group(g) {
  const count = g.desired || g.ready ? (g.ready || '0') + '/' + (g.desired || '?') + ' ready' : g.machines.length + ' machines';
  const behind = g.upToDate && g.desired && g.upToDate !== g.desired ? g.upToDate + '/' + g.desired + ' up to date' : null;
  const machines = [...g.machines].sort((a, b) => order.indexOf(a.health) - order.indexOf(b.health));
  return h('div', { class: 'group', 'data-key': g.kind + g.name },
    h('h3', null, text(g.name || g.kind, 'name'), g.name ? text(g.kind, 'kind') : null, g.version ? text(g.version, 'mono') : null, h('span', { class: 'note' }, count), behind ? h('span', { class: 'tag' }, behind) : null),
    machines.length ? h('ul', { class: 'machines' }, machines.map(machine)) : h('p', { class: 'empty small' }, 'No machines.'));
}

function machine(m) {
  const w = m.waiting;
  return h('li', { class: 'machine ' + m.health, 'data-key': m.id, id: 'object ' + m.id, tabindex: '-1' },
    health(m.health), text(m.name, 'name'),
    h('span', { class: 'phase' }, m.phase ? text(m.phase) : '–'),
    h('span', { class: 'host' }, m.host ? goTo('CapstanHost//' + m.host, m.host) : 'no host'),
    h('span', { class: 'mono' }, m.address ? text(m.address) : '–'),
    h('span', { class: 'mono' }, m.version ? text(m.version) : '–'),
    h('span', { class: 'size' }, m.size ? text(m.size) : null),
    w ? h('p', { class: 'why' }, text(w.reason || w.condition, 'reason'), w.message ? [' ', text(w.message)] : null, ' ', since(w.since)) : null);
}

draw.pools = () => {
  const all = state.pools;
  const shown = all.filter((p) => matches(p.name, p.namespace, ...p.subnets, ...p.addresses.flatMap((a) => [a.address, a.claim])));
  heading('pools', 'Addresses', all.length ? (all.length === 1 ? '1 pool' : all.length + ' pools') : null);
  fill('pools', notices('pools'),
    all.length === 0 ? h('p', { class: 'empty' }, reading('pools') ? 'Reading…' : 'No pools of addresses.') : null,
    noMatch(all, shown, 'pool'),
    shown.length ? h('ul', { class: 'pools', 'data-key': 'pools' }, shown.map(pool)) : null);
};

function pool(p) {
  const counts = [[p.free, 'free'], [p.used, 'used'], [p.resting, 'resting'], [p.outOfRange, 'out of range'], [p.claims, 'claims wait']];
  return h('li', { class: 'pool ' + p.health, 'data-key': p.id, id: 'object ' + p.id, tabindex: '-1' },
    h('p', { class: 'title' }, health(p.health), text(p.name, 'name'), p.global ? h('span', { class: 'tag' }, 'global') : text(p.namespace, 'namespace')),
    h('p', { class: 'facts' }, p.subnets.slice(0, 6).map((s) => text(s, 'mono')), p.subnets.length > 6 ? '+' + (p.subnets.length - 6) : null),
    bar(p.share, 'Addresses used', p.share >= 0.9 ? 'high' : ''),
    h('p', { class: 'counts' }, counts.filter(([n, name], i) => n && (i < 2 || n !== '0')).map(([n, name]) => h('span', { title: n }, h('b', null, short(n)), ' ' + name)), p.total ? h('span', { class: 'of', title: p.total }, 'of ' + short(p.total)) : null),
    p.waiting.length ? h('p', { class: 'why' }, text(p.waiting[0].message || p.waiting[0].reason || p.waiting[0].condition)) : null,
    p.addresses.length ? h('details', { 'data-key': 'addresses' }, h('summary', null, icon('chevron'), 'Used addresses', h('span', { class: 'note' }, String(p.addresses.length + (p.cut || 0)))),
      h('ul', { class: 'addresses' }, p.addresses.map((a) => h('li', { 'data-key': a.address }, text(a.address, 'mono'), text(a.namespace + '/' + a.claim, 'claim')))),
      p.cut ? h('p', { class: 'notice' }, icon('cut'), 'and ' + p.cut + ' more') : null) : null);
}

draw.events = () => {
  const all = state.events;
  const shown = all.filter((e) => matches(e.kind, e.namespace, e.name, e.reason, e.message));
  heading('events', 'Events', null);
  fill('events', notices('events'),
    all.length === 0 ? h('p', { class: 'empty' }, reading('events') ? 'Reading…' : 'No events in the last hour.') : null,
    noMatch(all, shown, 'event'),
    shown.length ? h('ol', { class: 'events', 'data-key': 'events' }, shown.map((e) => h('li', { class: e.warning ? 'warning' : '', 'data-key': e.time + e.namespace + e.name + e.reason + e.message },
      h('p', { class: 'line' }, e.warning ? icon('attention', 'warning') : null, text(e.reason, 'reason'), ' ', text(e.name, 'name'), e.count > 1 ? h('span', { class: 'count' }, '×' + e.count) : null, since(e.time)),
      h('p', { class: 'message' }, text(e.message)),
      h('p', { class: 'about' }, text(e.kind), e.namespace ? [' · ', text(e.namespace)] : null)))) : null);
};

draw.access = () => {
  const names = { reading: 'reading', readable: 'readable', forbidden: 'no right', missing: 'not installed', failed: 'no answer' };
  const moods = { reading: 'working', readable: 'ok', forbidden: 'lock', missing: 'unknown', failed: 'attention' };
  const refused = state.access.filter((a) => a.state !== 'readable' || a.namespace || a.cut).length;
  fill('access', h('details', { 'data-key': 'access' },
    h('summary', null, icon('chevron'), state.access.length + ' kinds of objects', h('span', { class: 'note' }, refused ? refused + ' with limits' : 'all readable')),
    h('ul', { class: 'access' }, state.access.map((a) => h('li', { 'data-key': a.kind, title: a.message }, icon(moods[a.state]), h('span', null, a.kind),
      h('span', { class: 'note' }, a.state === 'readable' ? a.shown + (a.cut ? '+' : '') : names[a.state], a.namespace ? [' in ', text(a.namespace)] : null))))));
  for (const section of ['waiting', 'hosts', 'clusters', 'pools', 'events']) if (state[section]) draw[section]();
  showBanner();
};

// ---- connection -----------------------------------------------------------------------------------------------------

// The server sends a sign of life every ten seconds.
const patience = 25000;
let source = null;
let begun = 0; // time of the last attempt to connect
let last = 0; // time of the last sign of life
let lost = null; // why the connection is lost; null while it lives
let dirty = new Set();

function showBanner() {
  const failed = state.access.filter((a) => a.state === 'failed');
  const live = state.access.filter((a) => a.state === 'readable' || a.state === 'reading');
  let message = null;
  if (lost) message = lost + (last ? ' The state of ' + new Date(last).toLocaleTimeString() + ' is shown.' : '');
  else if (failed.length && !live.length) message = 'The management API does not answer. The last known state is shown; the command tries again. ' + failed[0].message;
  $('banner').hidden = !message;
  if ($('banner').textContent !== (message || '')) $('banner').textContent = message || '';
  const now = lost ? (last ? 'Reconnecting' : 'Connecting') : message ? 'No answer' : last ? 'Live' : 'Connecting';
  if ($('live-text').textContent !== now) $('live-text').textContent = now;
  $('live').className = 'live ' + (lost || message ? 'lost' : last ? 'on' : '');
  document.body.classList.toggle('stale', Boolean(message));
}

function alive() {
  last = Date.now();
  lost = null;
  showBanner();
}

function connect() {
  if (source) source.close();
  begun = Date.now();
  source = new EventSource('stream');
  for (const section of ['source', 'summary', 'waiting', 'updates', 'hosts', 'clusters', 'pools', 'events', 'access']) {
    source.addEventListener(section, (e) => {
      state[section] = JSON.parse(e.data) || [];
      dirty.add(section);
    });
  }
  source.addEventListener('complete', () => {
    // access redraws the other sections; updates are a part of waiting.
    if (dirty.delete('updates')) dirty.add('waiting');
    if (dirty.delete('events')) { dirty.add('events'); dirty.add('summary'); }
    if (dirty.has('access')) dirty = new Set([...dirty].filter((name) => name === 'source' || name === 'summary' || name === 'access'));
    for (const section of dirty) draw[section]();
    dirty.clear();
    alive();
  });
  source.addEventListener('alive', alive);
  source.addEventListener('error', () => {
    lost = lost || 'The connection to capstan dashboard is lost. The page reconnects by itself.';
    showBanner();
  });
}

// Browsers reconnect by themselves after a broken connection, but not after an answer with an error, nor after silence.
async function supervise() {
  if (source.readyState !== EventSource.CLOSED && Date.now() - Math.max(last, begun) < patience) return;
  lost = lost || 'The connection to capstan dashboard is lost. The page reconnects by itself.';
  try {
    const answer = await fetch('icon.svg', { method: 'HEAD', cache: 'no-store' });
    if (answer.status === 404) lost = 'The command was started again: open the address that capstan dashboard prints now.';
    else connect();
  } catch {
    lost = 'The connection to capstan dashboard is lost: does the command still run? The page reconnects by itself.';
  }
  showBanner();
}

// ---- keyboard and pointer -------------------------------------------------------------------------------------------

function show(key) {
  const target = document.getElementById('object ' + key);
  if (!target) return;
  for (let node = target.parentElement; node; node = node.parentElement) if (node.nodeName === 'DETAILS') node.open = true;
  if (target.nodeName === 'DETAILS') target.open = true;
  const focus = target.nodeName === 'DETAILS' ? target.querySelector('summary') : target;
  focus.focus({ preventScroll: true });
  focus.scrollIntoView({ block: 'center', behavior: matchMedia('(prefers-reduced-motion: reduce)').matches ? 'auto' : 'smooth' });
  target.classList.add('shown');
  setTimeout(() => target.classList.remove('shown'), 1600);
}

document.addEventListener('click', (e) => {
  const button = e.target.closest('[data-goto]');
  if (button) show(button.dataset.goto);
});

document.addEventListener('keydown', (e) => {
  const typing = e.target.closest('input, textarea');
  if (e.key === '/' && !typing && !e.ctrlKey && !e.metaKey && !e.altKey) {
    e.preventDefault();
    $('filter').focus();
  }
  if (e.key === 'Escape' && e.target === $('filter')) {
    $('filter').value = '';
    filter();
  }
  const slot = e.target.closest('button.slot');
  if (slot) move(e, slot);
});

// move goes to another machine of the same host.
function move(e, slot) {
  const all = [...slot.parentElement.querySelectorAll('button.slot')];
  const at = all.indexOf(slot);
  const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: all.length - 1 }[e.key];
  if (to === undefined || !all[to]) return;
  e.preventDefault();
  for (const other of all) other.setAttribute('tabindex', '-1');
  all[to].setAttribute('tabindex', '0');
  all[to].focus();
}

function filter() {
  query = $('filter').value.trim().toLowerCase();
  for (const section of ['waiting', 'hosts', 'clusters', 'pools', 'events']) if (state[section]) draw[section]();
}

$('filter').addEventListener('input', filter);
$('search').addEventListener('submit', (e) => e.preventDefault());

setInterval(() => {
  for (const time of document.querySelectorAll('time')) {
    const now = age(time.dateTime);
    if (time.textContent !== now) time.textContent = now;
  }
}, 5000);
setInterval(supervise, 3000);
connect();
