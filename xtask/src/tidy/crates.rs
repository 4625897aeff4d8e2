//! Rules about manifests.

use std::collections::BTreeMap;
use std::process::Command;

use serde_json::Value;

use super::Findings;
use super::tree::Tree;

/// The crates of this workspace that each crate may use: the arrows of ARCHITECTURE.md. Nothing points upward.
const LAYERS: &str = "\
lmc-key:
lmc-memory:
lmc-backend: lmc-key lmc-memory
lmc-backend-local: lmc-key lmc-memory lmc-backend
lmc-backend-disk: lmc-key lmc-memory lmc-backend
lmc-transfer: lmc-memory
lmc-backend-p2p: lmc-key lmc-memory lmc-backend lmc-transfer
lmc-backend-remote: lmc-key lmc-memory lmc-backend
lmc-testkit: lmc-memory
lmc-fake-cuda:
lmc-engine: lmc-key lmc-memory lmc-backend lmc-backend-local
lmc: lmc-key lmc-memory lmc-backend lmc-backend-disk lmc-backend-p2p lmc-backend-remote lmc-engine lmc-transfer
lmc-vllm-adapter: lmc-key lmc-memory lmc-backend lmc-engine
lmc-server: lmc-key lmc-memory lmc-backend lmc-backend-disk lmc-backend-local lmc-backend-p2p lmc-backend-remote lmc-engine lmc-transfer lmc-vllm-adapter";

/// Crates that are a helper of tests as a whole, which every crate may use in its own.
pub(super) const TEST_CRATES: [&str; 2] = ["lmc-testkit", "lmc-fake-cuda"];

const KINDS: [&str; 3] = ["dependencies", "dev-dependencies", "build-dependencies"];

/// Names of the dependencies of one kind, those for some targets only among them.
fn dependencies(manifest: &toml::Table, kind: &str) -> Vec<String> {
    let own = manifest.get(kind);
    let targets = manifest.get("target").and_then(toml::Value::as_table);
    let targets = targets.into_iter().flat_map(toml::Table::values);
    own.into_iter()
        .chain(targets.filter_map(|target| target.get(kind)))
        .filter_map(toml::Value::as_table)
        .flat_map(|table| table.keys().cloned())
        .collect()
}

/// Crates use only what lies below them, in their tests as well.
pub(crate) fn layering(tree: &Tree, findings: &mut Findings) {
    let layers = || LAYERS.lines().filter_map(|line| line.split_once(':'));
    for folder in tree.crates() {
        let manifest = tree.manifest(&format!("crates/{folder}/Cargo.toml"));
        let name = text(&manifest, "name");
        if name != folder {
            findings
                .faults
                .push(format!("crate {name} lies in another folder: {folder}"));
        }
        let Some((_, allowed)) = layers().find(|(layer, _)| *layer == folder) else {
            findings.faults.push(format!(
                "crate {folder} is missing in LAYERS of xtask/src/tidy/crates.rs"
            ));
            continue;
        };
        for kind in KINDS {
            for used in dependencies(&manifest, kind) {
                let ours = used.starts_with("lmc-") || used == "xtask";
                // A crate's tests may name the crate itself, to turn a feature on.
                let for_tests = used == folder || TEST_CRATES.contains(&used.as_str());
                let own = kind == "dev-dependencies" && for_tests;
                if ours && !own && !allowed.split(' ').any(|below| below == used) {
                    findings
                        .faults
                        .push(format!("{folder} uses {used}, which is not below it"));
                }
            }
        }
    }
    for (name, _) in layers() {
        if !tree.crates().contains(&name) {
            findings
                .faults
                .push(format!("{name} stands in LAYERS but not in crates/"));
        }
    }
}

/// No dependency needs a later Rust than the `rust-version` of the workspace. Clippy's
/// `incompatible_msrv` checks the same of what our code uses of the standard library.
pub(crate) fn rust_versions(tree: &Tree, findings: &mut Findings) {
    let workspace = tree.manifest("Cargo.toml");
    let declared = workspace["workspace"]["package"]["rust-version"].as_str();
    let declared = declared.and_then(minor_version).unwrap_or(0);
    let metadata = Command::new("cargo")
        .args(["metadata", "--locked", "--format-version", "1"])
        .current_dir(crate::root())
        .output();
    let metadata = metadata.map(|output| serde_json::from_slice::<Value>(&output.stdout));
    let Ok(Ok(metadata)) = metadata else {
        findings
            .faults
            .push("cargo metadata --locked fails".to_owned());
        return;
    };
    for package in metadata["packages"].as_array().into_iter().flatten() {
        let needs = package["rust_version"].as_str();
        if needs.and_then(minor_version) > Some(declared) {
            findings.faults.push(format!(
                "{} {} needs Rust {}, rust-version in Cargo.toml is 1.{declared}",
                package["name"],
                package["version"],
                needs.unwrap_or_default()
            ));
        }
    }
}

/// Returns the 90 of `1.90` or `1.90.1`.
fn minor_version(version: &str) -> Option<u32> {
    version.split('.').nth(1)?.parse().ok()
}

/// Each outside crate has its reason above it, in the workspace's manifest or, where one crate
/// alone uses it, in that crate's; and a crate uses it.
pub(crate) fn reasons(tree: &Tree, findings: &mut Findings) {
    let mut manifests = ["xtask", "python"]
        .map(|folder| format!("{folder}/Cargo.toml"))
        .to_vec();
    manifests.extend(
        tree.crates()
            .iter()
            .map(|name| format!("crates/{name}/Cargo.toml")),
    );
    let mut used = Vec::new();
    for path in &manifests {
        let manifest = tree.manifest(path);
        for kind in KINDS {
            used.extend(dependencies(&manifest, kind));
        }
        unexplained(path, tree.text(path), findings);
    }
    unexplained("Cargo.toml", tree.text("Cargo.toml"), findings);
    let workspace = tree.manifest("Cargo.toml");
    let shared = workspace
        .get("workspace")
        .and_then(|table| table.get("dependencies"))
        .and_then(toml::Value::as_table);
    for name in shared.into_iter().flat_map(toml::Table::keys) {
        if !used.contains(name) {
            findings
                .faults
                .push(format!("Cargo.toml: no crate uses {name}"));
        }
    }
}

fn unexplained(path: &str, text: &str, findings: &mut Findings) {
    let (mut inside, mut explained) = (false, false);
    for (index, line) in text.lines().enumerate() {
        if line.starts_with('[') {
            inside = line.trim_matches(['[', ']']).ends_with("dependencies");
        }
        let entry = inside && line.contains('=') && line.starts_with(char::is_alphabetic);
        let ours = line.starts_with("lmc-") || line.contains("workspace = true");
        if entry && !ours && !explained && !line.contains(" # ") {
            findings
                .faults
                .push(format!("{path}:{}: no reason above `{line}`", index + 1));
        }
        explained = line.starts_with('#');
    }
}

/// Each crate says what it is: description, licence, README, first lines of its docs.
pub(crate) fn descriptions(tree: &Tree, findings: &mut Findings) {
    let workspace = tree.manifest("Cargo.toml");
    let licence = workspace
        .get("workspace")
        .and_then(|table| table.get("package")?.get("license")?.as_str());
    if licence != Some("Apache-2.0") {
        findings
            .faults
            .push("Cargo.toml: workspace.package.license is not Apache-2.0".to_owned());
    }
    for name in tree.crates() {
        let folder = format!("crates/{name}");
        let manifest = tree.manifest(&format!("{folder}/Cargo.toml"));
        let mut fault = |what: &str| findings.faults.push(format!("{folder}: {what}"));
        if text(&manifest, "description").len() < 20 {
            fault("no description in Cargo.toml");
        }
        let inherits = |table: &str, key: &str| {
            let value = manifest.get(table).and_then(|table| table.get(key));
            value == Some(&toml::Value::Boolean(true))
        };
        let licensed = manifest
            .get("package")
            .and_then(|package| package.get("license")?.get("workspace"));
        if licensed != Some(&toml::Value::Boolean(true)) {
            fault("no `license.workspace = true` in Cargo.toml");
        }
        if !inherits("lints", "workspace") {
            fault("no `workspace = true` under [lints] in Cargo.toml");
        }
        if tree.text(&format!("{folder}/README.md")).len() < 100 {
            fault("README.md says too little");
        }
        if !tree
            .text(&format!("{folder}/src/lib.rs"))
            .starts_with("//! ")
        {
            fault("src/lib.rs does not say what the crate is");
        }
    }
}

/// No two crates have an example of one name: cargo builds them into one file. Examples are found
/// by their path in `examples/`.
pub(crate) fn examples(tree: &Tree, findings: &mut Findings) {
    let mut seen = BTreeMap::new();
    for file in tree.with_ending("rs") {
        let Some((folder, name)) = file.path.split_once("/examples/") else {
            continue;
        };
        let name = name.strip_suffix("/main.rs").or(name.strip_suffix(".rs"));
        let Some(name) = name.filter(|name| !name.contains('/')) else {
            continue;
        };
        if let Some(other) = seen.insert(name, folder) {
            findings
                .faults
                .push(format!("{other} and {folder} both have an example {name}"));
        }
    }
}

/// A text of a manifest's `[package]`; empty where there is none.
fn text<'a>(manifest: &'a toml::Table, key: &str) -> &'a str {
    manifest
        .get("package")
        .and_then(|package| package.get(key)?.as_str())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crate_that_reaches_up_is_found() {
        let mut findings = Findings::default();
        let manifest = "[package]\nname = \"lmc-key\"\n[dev-dependencies]\n\
                        lmc-key = { path = \".\" }\nlmc-engine.workspace = true\n";
        layering(
            &Tree::of(&[("crates/lmc-key/Cargo.toml", manifest)]),
            &mut findings,
        );
        assert!(
            findings
                .faults
                .contains(&"lmc-key uses lmc-engine, which is not below it".to_owned())
        );
        assert!(!findings.faults.iter().any(|f| f.contains("uses lmc-key")));
    }

    /// Two examples named `embed` were one file in `target/`, of which cargo only warns.
    #[test]
    fn two_examples_of_one_name_are_found() {
        let mut findings = Findings::default();
        let files = [
            "crates/a/examples/embed.rs",
            "crates/b/examples/embed.rs",
            "crates/b/examples/speed/main.rs",
            "crates/b/examples/speed/embed.rs",
            "crates/c/examples/speed.rs",
        ];
        examples(&Tree::of(&files.map(|path| (path, ""))), &mut findings);
        let wanted = [
            "crates/a and crates/b both have an example embed",
            "crates/b and crates/c both have an example speed",
        ];
        assert_eq!(findings.faults, wanted);
    }

    #[test]
    fn a_dependency_without_a_reason_is_found() {
        let mut findings = Findings::default();
        let text = "[dependencies]\n# Why.\na = \"1\"\nb = \"1\"\nc = \"1\" # Why.\n\
                    d.workspace = true\n[features]\ne = []\n";
        unexplained("Cargo.toml", text, &mut findings);
        assert_eq!(
            findings.faults,
            ["Cargo.toml:4: no reason above `b = \"1\"`"]
        );
    }
}
