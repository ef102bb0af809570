// Open notebooks in JupyterLab, run them if asked, unfold what is folded, look at the colours.
//
//   node notebooks.js URL OUT_FOLDER CHROMIUM NAME[:run] ...
//
// Prints one JSON object a notebook. JupyterLab must run with --LabApp.expose_app_in_browser=True.
const { chromium } = require("playwright-core");
const [url, out, browserPath, ...names] = process.argv.slice(2);
const FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
  "--disable-background-networking", "--disable-component-update", "--disable-sync"];
const RUN_MS = 400000;

// In the page: what the notebook's model holds, whatever is scrolled into view.
function summary() {
  const cells = window.jupyterapp.shell.currentWidget.content.model.toJSON().cells;
  const outputs = cells.flatMap((cell, index) => (cell.outputs || []).map((o) => ({ ...o, index })));
  const html = (o) => [o.data?.["text/html"] || ""].flat().join("");
  return {
    cells: cells.length,
    errors: outputs.filter((o) => o.output_type === "error").map((o) => `${o.ename}: ${o.evalue}`),
    unrun: cells.filter((c) => c.cell_type === "code" && !c.execution_count).length,
    folded: [...new Set(outputs.filter((o) => html(o).includes("<details")).map((o) => o.index))],
    images: outputs.filter((o) => o.data?.["image/png"]).length,
    theme: document.body.dataset.jpThemeName,
  };
}

// In the page: the least contrast (WCAG 2) of text in rendered outputs against its ground.
function leastContrast() {
  const parse = (text) => text.match(/[\d.]+/g).map(Number);
  const channel = (v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const colour = parse(getComputedStyle(node).backgroundColor);
      if (colour.length < 4 || colour[3] > 0.5) return colour;
    }
    return [255, 255, 255];
  };
  let least = { contrast: 21, text: "" };
  for (const node of document.querySelectorAll(".jp-OutputArea-output, .jp-OutputArea-output *")) {
    const text = [...node.childNodes].filter((n) => n.nodeType === 3).map((n) => n.data.trim()).join("");
    if (!text || !node.getClientRects().length) continue;
    const [a, b] = [light(parse(getComputedStyle(node).color)), light(ground(node))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < least.contrast) least = { contrast, text: text.slice(0, 80) };
  }
  return least;
}

async function unfold(page, index) {
  await page.evaluate((i) => window.jupyterapp.shell.currentWidget.content.scrollToItem(i, "start"), index);
  const fold = page.locator(`.jp-Cell[data-windowed-list-index="${index}"] details`).first();
  await fold.waitFor({ timeout: 20000 });
  await fold.locator("summary").first().click();
  return fold.evaluate((node) => node.open && node.getBoundingClientRect().height > 40);
}

async function visit(page, spec) {
  const [name, run] = spec.split(":");
  await page.goto(`${url}/lab/tree/${name}.ipynb?reset`, { waitUntil: "load" });
  await page.waitForSelector(".jp-Notebook .jp-Cell", { timeout: 60000 });
  await page.evaluate(() => window.jupyterapp.shell.currentWidget.context.ready);
  if (run) {
    await page.evaluate(() => window.jupyterapp.shell.currentWidget.sessionContext.ready);
    await page.evaluate(() => window.jupyterapp.commands.execute("notebook:run-all-cells"));
  }
  const found = { name, ran: Boolean(run), ...(await page.evaluate(summary)), unfolded: 0 };
  let least = { contrast: 21, text: "" };
  for (let index = 0; index < found.cells; index += 3) {
    await page.evaluate((i) => window.jupyterapp.shell.currentWidget.content.scrollToItem(i, "start"), index);
    await page.waitForTimeout(250);
    const here = await page.evaluate(leastContrast);
    if (here.contrast < least.contrast) least = here;
    if (index % 6 === 0) await page.screenshot({ path: `${out}/${name}-${String(index).padStart(2, "0")}.png` });
  }
  for (const index of found.folded.slice(0, 4)) found.unfolded += (await unfold(page, index)) ? 1 : 0;
  await page.screenshot({ path: `${out}/${name}-unfolded.png` });
  const folds = await page.evaluate(leastContrast);
  console.log(JSON.stringify({ ...found, least: folds.contrast < least.contrast ? folds : least }));
}

(async () => {
  const browser = await chromium.launch({ executablePath: browserPath, args: FLAGS });
  const page = await browser.newPage({ viewport: { width: 1300, height: 1000 } });
  page.setDefaultTimeout(RUN_MS);
  for (const spec of names) await visit(page, spec);
  await browser.close();
})().catch((error) => { console.error(error); process.exit(1); });
