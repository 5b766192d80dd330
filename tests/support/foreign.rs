//! Files and programs of other projects that tests use. A file in this repository has the version and the hash of each.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Mutex;

use serde_json::{Deserializer, Value};

use crate::program::cargo;

/// A cache of the results of commands that take seconds.
static KNOWN: Mutex<BTreeMap<String, PathBuf>> = Mutex::new(BTreeMap::new());

/// Returns the folder of a crate that the `Cargo.lock` of this package of the tests names.
pub fn rust_crate(package: &str, name: &str) -> PathBuf {
    known(&format!("{package}: {name}"), || {
        let output = cargo()
            .args(["metadata", "--format-version=1", "--locked"])
            .arg("--manifest-path")
            .arg(folder(package).join("Cargo.toml"))
            .output()
            .unwrap();
        let metadata: Value = serde_json::from_slice(&successful(output)).unwrap();
        let packages = metadata["packages"].as_array().unwrap();
        let found = packages.iter().find(|package| package["name"] == name);
        let manifest = found.unwrap()["manifest_path"].as_str().unwrap();
        Path::new(manifest).parent().unwrap().into()
    })
}

/// Builds a program of a package below tests/ that uses another project's library, and returns the program's path. It is static, as ours.
pub fn rust_program(package: &str, program: &str) -> PathBuf {
    let folder = built(package, crate::ROOT, &[]);
    folder.join("x86_64-unknown-linux-musl/debug").join(program)
}

/// Builds such a program with shared libraries: those of this machine, unless the variables for Cargo name others.
pub fn rust_program_with_libraries(
    package: &str,
    program: &str,
    variables: &[(&str, String)],
) -> PathBuf {
    // outside the checkout, whose configuration names musl
    built(package, "/", variables).join("debug").join(program)
}

/// Builds a package of the tests from a folder, and returns Cargo's target folder.
fn built(package: &str, from: &str, variables: &[(&str, String)]) -> PathBuf {
    known(package, || {
        let target = Path::new(crate::ROOT).join("target").join(package);
        let built = cargo()
            .current_dir(from)
            .args(["build", "--locked", "--quiet", "--manifest-path"])
            .arg(folder(package).join("Cargo.toml"))
            .env("CARGO_TARGET_DIR", &target)
            .env_remove("CARGO_BUILD_TARGET")
            .envs(variables.iter().map(|(name, value)| (name, value)))
            .status()
            .unwrap();
        assert!(built.success());
        target
    })
}

/// Returns the folder of a Go module that the `go.sum` of this module of the tests names.
pub fn go_module(module: &str, name: &str) -> PathBuf {
    known(&format!("{module}: {name}"), || {
        let output = go(module)
            .args(["mod", "download", "-json", name])
            .output()
            .expect("the Go tool chain is installed (Debian: golang-go)");
        let output = successful(output);
        let downloaded = Deserializer::from_slice(&output)
            .into_iter::<Value>()
            .next();
        downloaded.unwrap().unwrap()["Dir"].as_str().unwrap().into()
    })
}

/// Returns the program of a Go module of the tests, which this function builds into the folder.
pub fn go_program(module: &str, into: &str) -> PathBuf {
    known(&format!("{module} in {into}"), || {
        let program = Path::new(into).join(module);
        let output = go(module)
            .args(["build", "-o"])
            .arg(&program)
            .arg(".")
            .output()
            .expect("the Go tool chain is installed (Debian: golang-go)");
        successful(output);
        program
    })
}

/// Returns a command of the Python interpreter that has the packages of `tools/python.sh`.
pub fn python() -> Command {
    Command::new(fetched("python.sh"))
}

/// Returns the path that this script of `tools` prints.
pub fn fetched(script: &str) -> PathBuf {
    known(script, || {
        let script = Path::new(crate::ROOT).join("tools").join(script);
        let output = successful(Command::new(script).output().unwrap());
        String::from_utf8(output).unwrap().trim().into()
    })
}

fn known(what: &str, find: impl FnOnce() -> PathBuf) -> PathBuf {
    let mut known = KNOWN
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    known.entry(what.to_owned()).or_insert_with(find).clone()
}

fn folder(name: &str) -> PathBuf {
    Path::new(crate::ROOT).join("tests").join(name)
}

fn go(module: &str) -> Command {
    let mut command = Command::new("go");
    command.current_dir(folder(module)).envs([
        ("GOFLAGS", "-mod=readonly"),
        ("GOTOOLCHAIN", "local"),
        ("CGO_ENABLED", "0"),
    ]);
    command
}

fn successful(output: Output) -> Vec<u8> {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {said}", output.status);
    output.stdout
}
