"""The report's style sheet: light and dark, from a phone's width up. Charts take their ink from its variables."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --ink: #1b2330; --muted: #5a6472; --grid: #dfe3e8; --paper: #ffffff;
  --soft: #f4f6f8; --link: #1f5fa8; --good: #1d7a4f; --bad: #b3261e; --warn: #8a5a00; --mark: #fff0b8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --muted: #9aa5b4; --grid: #343c48; --paper: #12161c;
  --soft: #1b212a; --link: #8ab8f0; --good: #5cc795; --bad: #ff8a80; --warn: #e0b050; --mark: #584a12; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 1.5rem 1rem 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.25rem; margin: 2.6rem 0 .6rem; padding-top: .6rem; border-top: 1px solid var(--grid); }
h3 { font-size: 1.05rem; margin: 1.8rem 0 .3rem; }
p { margin: .4rem 0; max-width: 48rem; }
ul { padding-left: 1.2rem; max-width: 48rem; }
a { color: var(--link); }
a:focus-visible, summary:focus-visible, .scroll:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
nav ul { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1rem; padding: 0; margin: 1rem 0; }
.sub, .note, .lead { color: var(--muted); }
.note { font-size: .875rem; }
.scroll { overflow-x: auto; margin: .8rem 0; max-width: 100%; }
table { border-collapse: collapse; font-size: .925rem; font-variant-numeric: tabular-nums; }
caption span { display: inline-block; position: sticky; left: 0; max-width: min(60rem, calc(100vw - 2rem)); }
caption { text-align: left; color: var(--muted); font-size: .875rem; padding-bottom: .3rem; }
th, td { text-align: left; vertical-align: top; padding: .35rem .8rem .35rem 0; }
thead th { border-bottom: 1px solid var(--muted); font-weight: 600; vertical-align: bottom; }
tbody th { font-weight: 500; }
tbody tr + tr > * { border-top: 1px solid var(--grid); }
th.group { padding-top: .9rem; font-weight: 650; }
th.number, td.number { text-align: right; }
.interval { display: block; color: var(--muted); font-size: .8rem; white-space: nowrap; }
code { font-size: .9em; background: var(--soft); padding: 0 .2em; border-radius: .2rem; }
pre code { font-size: inherit; padding: 0; }
.detail { display: block; color: var(--muted); font-size: .8rem; }
.rows { font-size: .8rem; }
.rows th, .rows td { white-space: nowrap; }
.checks { list-style: none; padding: 0; max-width: 52rem; }
.checks li { padding-left: 1.5rem; text-indent: -1.5rem; margin: .3rem 0; }
.checks .mark { display: inline-block; width: 1.5rem; text-indent: 0; font-weight: 700; }
.checks p, .checks details { text-indent: 0; }
.ok .mark { color: var(--good); } .finding .mark { color: var(--bad); } .note-line .mark { color: var(--warn); }
figure { margin: 1.2rem 0 2rem; }
.charts { display: flex; flex-wrap: wrap; gap: 1rem 2rem; align-items: flex-start; }
.charts > div { max-width: 100%; }
.charts svg { display: block; overflow: visible; max-width: 100%; height: auto; }
details { margin: .4rem 0; }
summary { cursor: pointer; color: var(--link); font-size: .875rem; width: fit-content; }
pre { background: var(--soft); padding: .7rem .9rem; border-radius: .3rem; overflow-x: auto; font-size: .8rem;
  line-height: 1.45; white-space: pre-wrap; }
.absent { color: var(--muted); font-style: italic; }
.text { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; font-size: .8rem; white-space: pre-wrap;
  overflow-wrap: anywhere; min-width: 12rem; display: inline-block; max-width: 21rem; }
.text mark { background: var(--mark); color: inherit; border-radius: .15rem; padding: 0 .1rem; }
.hidden { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
footer { margin-top: 3rem; color: var(--muted); font-size: .875rem; }
@media (max-width: 34rem) { body { font-size: 15px; padding-top: 1rem; } table { font-size: .85rem; }
  th, td { padding-right: .55rem; } .text { min-width: 8.5rem; } .detail { overflow-wrap: anywhere; } }
@media print { details { display: none; } .scroll { overflow: visible; } }
"""
