// What scrolls sideways takes the focus, so that a keyboard can scroll it too.
function reachable() {
  for (const box of document.querySelectorAll("pre, .table-wrapper, .cell_output, .picture, math[display=block]")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else if (box.getAttribute("tabindex") === "0") box.removeAttribute("tabindex");
  }
}
reachable();
addEventListener("resize", reachable);
