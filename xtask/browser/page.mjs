// Opens the page of a server in Chromium, as readers with a mouse, a keyboard or a screen reader do.
//
//     node page.mjs CASE TOOLS URL FOLDER
//
// CASE is `work` (a server at work), `fault` (its peer has gone) or `token` (the server requires the token in
// LMC_TEST_TOKEN). TOOLS is the folder of browser.sh; screenshots go to FOLDER. Prints one line for each check, and ends with
// status 1 where one has failed.
import { spawn } from "node:child_process";
import { createRequire } from "node:module";
import { join } from "node:path";
import { readFileSync } from "node:fs";

const [which, tools, server, folder] = process.argv.slice(2);
const require = createRequire(join(tools, "package.json"));
const puppeteer = require("puppeteer-core");
const axe = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");

let failed = 0;
function check(name, is_right, why = "") {
  console.log(`${is_right ? "ok" : "FAILED"} ${name}${is_right ? "" : `: ${why}`}`);
  failed += is_right ? 0 : 1;
}

/** Starts a relay to the server as a user that the server does not trust, and returns its URL. */
async function relayed() {
  const code = `const net = require("node:net");
    const relay = net.createServer((from) => {
      const to = net.connect(${new URL(server).port}, "127.0.0.1");
      from.pipe(to).pipe(from);
      for (const end of [from, to]) end.on("error", () => { from.destroy(); to.destroy(); });
    });
    relay.listen(0, "127.0.0.1", () => console.log(relay.address().port));`;
  const child = spawn(process.execPath, ["-e", code], { uid: 65534, gid: 65534, stdio: ["ignore", "pipe", "inherit"] });
  process.on("exit", () => child.kill());
  const [port] = await new Promise((resolve) => child.stdout.once("data", (line) => resolve(String(line).split("\n"))));
  return `http://127.0.0.1:${port}/`;
}

async function checkAxe(page, name) {
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => globalThis.axe.run(document, { resultTypes: ["violations"] }));
  const found = violations.map((one) => `${one.id} (${one.nodes.length}): ${one.nodes[0].html}`);
  check(`axe finds nothing ${name}`, found.length === 0, found.join("; "));
}

/** A server at work: content, colours, keyboard, narrow screens. */
async function work(page) {
  await page.waitForFunction(() => document.getElementById("state").textContent === "ok", { timeout: 60_000 });
  await page.waitForFunction(() => document.querySelector("#curve, #advice").textContent !== "", { timeout: 60_000 });
  await page.waitForFunction(() => document.querySelectorAll("#tenants tbody tr").length >= 3
    && document.querySelectorAll("#peers tbody tr").length >= 1, { timeout: 60_000 });
  const shown = await page.evaluate(() => document.getElementById("main").innerText);
  for (const part of ["found since the start", "memory in use", "lookup", "never stored", "memory", "Engines",
    "evicted", "peers", "disk", "remote", "_default", "32.0 MiB", "p50, minute"]) {
    check(`it shows "${part}"`, shown.includes(part), shown);
  }
  const charts = await page.evaluate(() => ["hits", "misses"].map((id) =>
    document.querySelector(`#${id} svg`).getAttribute("aria-label")));
  for (const name of ["memory", "disk", "peers", "remote", "not found"]) {
    check(`the chart of hits has a share for ${name}`, new RegExp(`${name} (?!0\\.0 %)\\d`).test(charts[0]), charts[0]);
  }
  check("the chart of misses names a reason", charts[1].includes("never stored"), charts[1]);
  const keys = await page.evaluate(() => document.querySelectorAll("#hits .keys span").length);
  const paths = await page.evaluate(() => document.querySelectorAll("#hits path").length);
  check("the chart of hits has a legend for each area", keys >= paths && paths >= 3, `${keys} and ${paths}`);
  const theme = () => page.evaluate(() => document.documentElement.dataset.theme);
  for (const name of ["light", "dark"]) {
    check(`the theme is ${name}`, (await theme()) === name, await theme());
    await checkAxe(page, `in ${name} colours`);
    await page.screenshot({ path: join(folder, `page-${name}.png`), fullPage: true });
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
}

/** A server whose only peer has gone. */
async function fault(page) {
  await page.waitForFunction(() => !document.getElementById("faults").hidden, { timeout: 60_000 });
  const shown = await page.evaluate(() => document.getElementById("faults").innerText);
  check("it shows the fault and its remedy", shown.includes("peers: no peer is connected: run `lmc peers`"), shown);
  const state = await page.evaluate(() => document.getElementById("state").textContent);
  check("the server is degraded", state.startsWith("degraded"), state);
  const row = await page.evaluate(() => [...document.querySelectorAll("#tiers tbody tr")].map((row) => row.innerText));
  check("the row of the tier has a fault", row.some((text) => /^peers\s+fault/.test(text)), row.join("; "));
  await checkAxe(page, "with a fault");
}

/** A server that requires a token. */
async function token(page) {
  const isShown = () => page.evaluate(() => !document.getElementById("ask").hidden);
  const answered = (code, text) => page.waitForResponse((response) =>
    response.status() === code && response.request().headers().authorization === `Bearer ${text}`, { timeout: 30_000 });
  await page.waitForFunction(() => !document.getElementById("ask").hidden, { timeout: 60_000 });
  await checkAxe(page, "in the form");
  const use = async (text, code) => {
    await page.$eval("#token", (input) => { input.value = ""; });
    await page.type("#token", text);
    const answer = answered(code, text);
    await page.keyboard.press("Enter");
    await answer;
  };
  await use("a-wrong-token-0123", 401);
  await page.waitForFunction(() => document.getElementById("refused").textContent !== "", { timeout: 30_000 });
  check("a wrong token leaves the form", await isShown());
  await use(process.env.LMC_TEST_TOKEN, 200);
  await page.waitForFunction(() => document.getElementById("state").textContent === "ok", { timeout: 30_000 });
  check("the right token opens the page", !(await isShown()));
}

const browser = await puppeteer.launch({
  executablePath: "/usr/bin/chromium",
  // The tests run as root in containers, where Chromium has no sandbox.
  args: ["--no-sandbox", "--disable-dev-shm-usage"],
  protocolTimeout: 120_000,
});
try {
  const url = which === "token" ? await relayed() : server;
  const page = await browser.newPage();
  const complaints = [];
  const others = [];
  page.on("console", (message) => {
    // Chromium reports the answers 401 that the form is for.
    const isRefusal = which === "token" && message.text().includes("status of 401");
    if (["error", "warning", "warn"].includes(message.type()) && !isRefusal) complaints.push(message.text());
  });
  page.on("pageerror", (error) => complaints.push(String(error)));
  page.on("request", (request) => {
    const at = new URL(request.url());
    if (at.protocol !== "data:" && at.origin !== new URL(url).origin) others.push(request.url());
  });
  await page.setViewport({ width: 1280, height: 1400 });
  await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: "light" }]);
  await page.goto(url);
  await { work, fault, token }[which](page);
  check("it asks no other host", others.length === 0, others.join(", "));
  check("the console is silent", complaints.length === 0, complaints.join("; "));
} finally {
  await browser.close();
}
process.exit(failed === 0 ? 0 : 1);
