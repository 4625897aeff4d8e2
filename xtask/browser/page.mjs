// Opens the page of a server in Chromium, as readers with a mouse, a keyboard or a screen reader do.
//
//     node page.mjs TOOLS URL [FOLDER]
//
// TOOLS is the folder of browser.sh; screenshots go to FOLDER. Prints one line for each check, and ends with
// status 1 where one has failed.
import { createRequire } from "node:module";
import { join } from "node:path";
import { readFileSync } from "node:fs";

const [tools, url, folder] = process.argv.slice(2);
const require = createRequire(join(tools, "package.json"));
const puppeteer = require("puppeteer-core");
const axe = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");

let failed = 0;
function check(name, is_right, why = "") {
  console.log(`${is_right ? "ok" : "FAILED"} ${name}${is_right ? "" : `: ${why}`}`);
  failed += is_right ? 0 : 1;
}

const browser = await puppeteer.launch({
  executablePath: "/usr/bin/chromium",
  // The tests run as root in containers, where Chromium has no sandbox.
  args: ["--no-sandbox", "--disable-dev-shm-usage"],
  protocolTimeout: 120_000,
});
try {
  const page = await browser.newPage();
  const complaints = [];
  const others = [];
  page.on("console", (message) => {
    if (["error", "warning", "warn"].includes(message.type())) complaints.push(message.text());
  });
  page.on("pageerror", (error) => complaints.push(String(error)));
  page.on("request", (request) => {
    const at = new URL(request.url());
    if (at.protocol !== "data:" && at.origin !== new URL(url).origin) others.push(request.url());
  });
  await page.setViewport({ width: 1280, height: 1400 });
  await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: "light" }]);
  await page.goto(url);
  await page.waitForFunction(() => document.getElementById("state").textContent === "ok", { timeout: 60_000 });
  await page.waitForFunction(() => document.querySelector("#curve, #advice").textContent !== "", { timeout: 60_000 });
  const shown = await page.evaluate(() => document.getElementById("main").innerText);
  for (const part of ["found since the start", "memory in use", "lookup", "never stored", "memory", "Engines"]) {
    check(`it shows "${part}"`, shown.includes(part), shown);
  }
  const theme = () => page.evaluate(() => document.documentElement.dataset.theme);
  for (const name of ["light", "dark"]) {
    check(`the theme is ${name}`, (await theme()) === name, await theme());
    await page.evaluate(axe);
    const { violations } = await page.evaluate(() => globalThis.axe.run(document, { resultTypes: ["violations"] }));
    const found = violations.map((one) => `${one.id} (${one.nodes.length}): ${one.nodes[0].html}`);
    check(`axe finds nothing in ${name} colours`, found.length === 0, found.join("; "));
    if (folder) await page.screenshot({ path: join(folder, `page-${name}.png`), fullPage: true });
    if (name === "light") {
      // The button is the first that the keyboard reaches.
      await page.keyboard.press("Tab");
      const focused = await page.evaluate(() => document.activeElement.id);
      check("the keyboard reaches the button", focused === "theme", focused);
      await page.keyboard.press("Enter");
    }
  }
  await page.setViewport({ width: 360, height: 800 });
  const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  check("it fits a narrow screen", wide <= 0, `${wide} pixels too wide`);
  check("it asks no other host", others.length === 0, others.join(", "));
  check("the console is silent", complaints.length === 0, complaints.join("; "));
} finally {
  await browser.close();
}
process.exit(failed === 0 ? 0 : 1);
