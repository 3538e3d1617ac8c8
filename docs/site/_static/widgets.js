// Puts what the scripts before this one brought, the widgets of this page and the modules that they share with other
// pages, into the place where page.js looks for it.
if (window.labkitWidgets) {
  const { modules, models } = window.labkitWidgets;
  const place = document.createElement("script");
  place.id = "labkit-widgets";
  place.type = "application/json";
  place.textContent = JSON.stringify({ modules: modules.map((name) => window.labkitModules[name]), models });
  document.body.append(place);
}
