"""A page with one of labkit's anywidgets and a stand-in for the model that Jupyter gives it."""

import base64
import json
import re

from labkit.viz.page import own_state

# `state` and `model` are globals of the page, `saved` counts calls of save_changes, and `pending` what Python has been
# told and has not answered. A function `python(values, content)`, if there is one, is told of changes and messages.
PAGE = """<!doctype html><body style="background: BACKGROUND"><style>CSS</style>
<div id="here" style="width: WIDTHpx"></div>
<script type="module">
MODULE
function revived(value) {
  if (value === null || typeof value !== "object") return value;
  if ("base64" in value) return new DataView(Uint8Array.from(atob(value.base64), (c) => c.charCodeAt(0)).buffer);
  if (Array.isArray(value)) return value.map(revived);
  return Object.fromEntries(Object.entries(value).map(([name, inner]) => [name, revived(inner)]));
}
const calls = {};
const tell = (event, ...what) => (calls[event] ?? []).forEach((call) => call(...what));
let changed = {};
Object.assign(window, { state: revived(STATE), saved: 0, pending: 0 });
window.receive = (name, value) => { state[name] = revived(value); tell("change:" + name); };
window.model = {
  get: (name) => state[name],
  set: (name, value) => { changed[name] = value; state[name] = value; tell("change:" + name); },
  save_changes: async () => {
    const values = changed;
    changed = {};
    window.saved += 1;
    window.pending += 1;
    const held = await window.python?.(values, null);
    if (held) receive("held", held);
    window.pending -= 1;
  },
  send: async (content) => {
    window.pending += 1;
    const [answer, buffer] = revived(await window.python(null, content));
    tell("msg:custom", answer, [buffer]);
    window.pending -= 1;
  },
  on: (event, call) => { (calls[event] ??= []).push(call); },
  off: (event, call) => { calls[event] = calls[event].filter((other) => other !== call); },
};
EXPOSED
window.began = performance.now();
window.leave = render({ model, el: document.getElementById("here") });
</script>"""


def plain(value):
    """`value` as JSON can hold it."""
    return json.loads(json.dumps(value, default=lambda data: {"base64": base64.b64encode(data).decode()}))


def show_widget(page, widget, background="white", width=760, exposed=""):
    """Open a page with the widget; `exposed` is JavaScript in the widget's own module."""
    state = json.dumps(plain(own_state(widget)) | {"_esm": "", "_css": ""}).replace("</", "<\\/")
    html = PAGE.replace("BACKGROUND", background).replace("WIDTH", str(width)).replace("CSS", widget._css)
    page.set_content(html.replace("EXPOSED", exposed).replace("STATE", state).replace("MODULE", widget._esm))
    page.wait_for_function("window.leave !== undefined")
    drawn(page)


def drawn(page):
    """Wait until what has changed is on show."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def press(page, keys: str) -> None:
    """Press these keys, one after the other."""
    for key in keys.split():
        page.keyboard.press(key)


def paint(page, start: tuple[int, int], end: tuple[int, int], steps: int = 4) -> None:
    """Drag over the cells of the playground's mask from one (query, key) to another, in `steps` jumps of the mouse."""
    grid = page.get_by_role("grid", name=re.compile("^attention mask"))
    grid.scroll_into_view_if_needed()
    box, n = grid.bounding_box(), page.locator(".pg-chip").count()
    at = [(box["x"] + (k + 0.5) * box["width"] / n, box["y"] + (q + 0.5) * box["height"] / n) for q, k in (start, end)]
    page.mouse.move(*at[0])
    page.mouse.down()
    page.mouse.move(*at[1], steps=steps)
    page.mouse.up()
