//! The operator's kubeconfigs: makes a client of the cluster that they name, and adds an
//! administrator's kubeconfig to the file that kubectl reads (`$KUBECONFIG`, else
//! `~/.kube/config`).
//!
//! The file is written as JSON, which is valid YAML 1.2. Comments of the existing file are lost, as
//! when kubectl writes it.

use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{env, io};

use serde_json::{Value, json};
use zeroize::Zeroizing;

use crate::shell::{
    error::Error,
    files::{self, FileError},
    progress::Progress,
};
use base::stop::Stop;
use clap::Args;
use kubernetes::client::{self, ApiAccess, Client};
use kubernetes::yaml;

/// The lists in a kubeconfig whose entries have names.
const LISTS: [&str; 3] = ["clusters", "users", "contexts"];

/// How long the API server may take to answer a command that works without it, too.
pub const ANSWER: Duration = Duration::from_secs(15);

/// The default file of the administrator's kubeconfig.
pub const KUBECONFIG_FILE: &str = "firstlight-admin.conf";

/// The administrator's kubeconfig.
#[derive(Debug, Clone, Args)]
pub struct KubeconfigOption {
    /// The administrator's kubeconfig; without it $KUBECONFIG if it is set, as for kubectl, or else firstlight-admin.conf
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
}

impl KubeconfigOption {
    /// Returns the kubeconfigs: from the option, else from `$KUBECONFIG` as kubectl reads it, else the default.
    pub fn paths(&self) -> Vec<PathBuf> {
        self.paths_or(KUBECONFIG_FILE)
    }

    /// The same with another default.
    pub fn paths_or(&self, default: &str) -> Vec<PathBuf> {
        if let Some(path) = &self.kubeconfig {
            return vec![path.clone()];
        }
        let named = of_environment();
        if named.is_empty() {
            return vec![default.into()];
        }
        if Path::new(default).exists() {
            log::warn!(
                "using the kubeconfig of $KUBECONFIG, not {default} in this folder: to use the latter, give --kubeconfig {default}"
            );
        }
        named
    }
}

/// Returns the files that `$KUBECONFIG` names.
pub fn of_environment() -> Vec<PathBuf> {
    let paths = env::var_os("KUBECONFIG").unwrap_or_default();
    let paths = env::split_paths(&paths);
    paths.filter(|it| !it.as_os_str().is_empty()).collect()
}

/// Returns the file that kubectl writes to: the first of `$KUBECONFIG`, else the one in the home
/// directory.
pub fn default_path() -> PathBuf {
    let named = of_environment().into_iter().next();
    named
        .unwrap_or_else(|| Path::new(&env::var_os("HOME").unwrap_or_default()).join(".kube/config"))
}

/// Returns a client of the cluster of these kubeconfigs. DNS must already know an address for the
/// server's name.
pub fn client(paths: &[PathBuf]) -> Result<Client, Error> {
    let config = read_config(paths)?;
    let client = Client::new(config, &Stop::new());
    client.resolve()?;
    Ok(client)
}

/// Reads the kubeconfigs. The error says how to name others if there is none.
pub fn read_config(paths: &[PathBuf]) -> Result<ApiAccess, client::Error> {
    ApiAccess::from_kubeconfig_files(paths).map_err(|error| match &error {
        client::Error::File(path, cause) if cause.kind() == io::ErrorKind::NotFound => {
            let why = "it does not exist: name the kubeconfig by --kubeconfig or $KUBECONFIG";
            client::Error::File(path.clone(), io::Error::new(cause.kind(), why))
        }
        _ => error,
    })
}

/// Returns a client of an API server that answers soon. The error is [`Error::Unreachable`] if it does not, or if there is no kubeconfig.
pub fn reach(paths: &[PathBuf], progress: &Progress) -> Result<Client, Error> {
    if let [path] = paths
        && !path.exists()
    {
        let why = format!("{} does not exist", path.display());
        return Err(Error::Unreachable(why));
    }
    let client = client(paths)?;
    progress.phase(format!("asking the API server {}", client.server()));
    client.within(ANSWER).wait_ready(&mut |_| {})?;
    Ok(client)
}

/// Checks that [`merge`] can read the file at `path`, if there is one.
pub fn check(path: &Path) -> Result<(), FileError> {
    there(path).map(|_| ())
}

/// Reads the file at `path`; an empty kubeconfig if there is none.
fn there(path: &Path) -> Result<Value, FileError> {
    let there = match files::read(path) {
        Ok(there) => there,
        Err(error) if error.kind() == Some(io::ErrorKind::NotFound) => Zeroizing::default(),
        Err(error) => return Err(error),
    };
    // comments only are as good as nothing
    let documents = str::from_utf8(&there)
        .ok()
        .and_then(|text| yaml::documents(text).ok());
    if documents.is_some_and(|documents| documents.iter().all(Value::is_null)) {
        Ok(json!({"apiVersion": "v1", "kind": "Config"}))
    } else {
        read(&there).map_err(|why| FileError::Content(path.into(), why.to_string()))
    }
}

/// Adds all entries of `new` to the file at `path`, makes its context the current one, and returns
/// the context's name. Changes nothing if the file has a different entry of the same name.
pub fn merge(path: &Path, new: &[u8]) -> Result<String, FileError> {
    let content = |why: String| FileError::Content(path.into(), why);
    let mut all = there(path)?;
    let new = read(new).map_err(|why| content(format!("the new cluster's kubeconfig: {why}")))?;
    add(&mut all, &new).map_err(|why| content(why.to_string()))?;
    let context = new["current-context"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    all["current-context"] = json!(context);
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory)
            .map_err(|error| FileError::Io("make", directory.into(), error))?;
    }
    let text = Zeroizing::new(format!("{all:#}\n"));
    files::replace_private(path, text.as_bytes())?;
    Ok(context)
}

fn read(text: &[u8]) -> Result<Value, Error> {
    let text = str::from_utf8(text).map_err(Error::content)?;
    let value = yaml::document(text).map_err(Error::content)?;
    if value.is_object() {
        Ok(value)
    } else {
        Err(Error::content("not a kubeconfig: it is not a mapping"))
    }
}

fn add(all: &mut Value, new: &Value) -> Result<(), Error> {
    for list in LISTS {
        if all[list].is_null() {
            all[list] = json!([]);
        }
        let entries = all[list]
            .as_array_mut()
            .ok_or_else(|| format!("not a kubeconfig: its {list} are not a list"))?;
        for entry in new[list].as_array().into_iter().flatten() {
            match entries.iter().find(|there| there["name"] == entry["name"]) {
                Some(there) if there == entry => {}
                Some(_) => {
                    return Err(Error::Content(format!(
                        "its {list} have a different entry named {}: rename that entry, or give the new cluster another name \
                         with --cluster-name",
                        entry["name"]
                    )));
                }
                None => entries.push(entry.clone()),
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const NEW: &str = "apiVersion: v1\nkind: Config\nclusters:\n- name: green\n  cluster: {server: https://10.0.0.1:6443}\n\
        users:\n- name: green-admin\n  user: {token: t}\ncontexts:\n- name: green-admin@green\n  context: {cluster: green, user: \
        green-admin}\ncurrent-context: green-admin@green\n";

    #[test]
    fn a_cluster_is_added_beside_others_and_becomes_the_current_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new/.kube/config");
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, "# nothing yet\n").unwrap();
        assert_eq!(merge(&path, NEW.as_bytes()).unwrap(), "green-admin@green");
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600
        );
        let blue = NEW.replace("green", "blue").replace("10.0.0.1", "10.0.0.2");
        merge(&path, blue.as_bytes()).unwrap();
        merge(&path, blue.as_bytes()).unwrap();
        let all = read(&fs::read(&path).unwrap()).unwrap();
        assert_eq!(all["current-context"], "blue-admin@blue");
        for list in LISTS {
            assert_eq!(all[list].as_array().unwrap().len(), 2, "{all:#}");
        }
        assert_eq!(
            all["clusters"][0]["cluster"]["server"],
            "https://10.0.0.1:6443"
        );
    }

    #[test]
    fn another_entry_of_the_same_name_stays_and_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config");
        fs::write(&path, NEW.replace("10.0.0.1", "192.0.2.1")).unwrap();
        let before = fs::read(&path).unwrap();
        let error = merge(&path, NEW.as_bytes()).unwrap_err().to_string();
        assert!(
            error.contains("\"green\"") && error.contains("--cluster-name"),
            "{error}"
        );
        assert_eq!(fs::read(&path).unwrap(), before);
        for content in ["- a", "clusters: 7", "a: b: c"] {
            fs::write(&path, content).unwrap();
            assert!(merge(&path, NEW.as_bytes()).is_err(), "{content}");
            assert_eq!(fs::read_to_string(&path).unwrap(), content);
        }
    }
}
