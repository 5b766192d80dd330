//! Saves the custom resources of a cluster before an add-on changes: a chart can replace their
//! definitions, and Helm cannot restore what is lost with them.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::time::SystemTime;

use base::time;
use kubernetes::client::{self, Client, Resource, Selector};
use serde_json::{Value, json};

const DEFINITIONS: Resource =
    Resource::cluster("apiextensions.k8s.io", "v1", "customresourcedefinitions");
/// Custom resources can contain credentials.
const PRIVATE: u32 = 0o600;

/// Why they were not saved.
pub enum Error {
    /// The API server refused a request or did not answer.
    Api(client::Error),
    /// The file cannot be written.
    Io(PathBuf, io::Error),
}

impl From<client::Error> for Error {
    fn from(error: client::Error) -> Error {
        Error::Api(error)
    }
}

/// Writes all definitions of custom resources, and their objects, into a new file in this folder, as a
/// list that `kubectl create -f` reads. Returns the file; `None` if the cluster has no definition.
pub fn custom_resources(client: &Client) -> Result<Option<PathBuf>, Error> {
    let definitions = client.list(&DEFINITIONS.all(), &Selector::default())?.items;
    if definitions.is_empty() {
        return Ok(None);
    }
    let mut items = vec![];
    for definition in &definitions {
        items.push(restorable(
            definition,
            "apiextensions.k8s.io/v1",
            "CustomResourceDefinition",
        ));
    }
    for definition in &definitions {
        items.extend(objects(client, definition)?);
    }
    let now = time::seconds(SystemTime::now()).replace(':', "");
    let path = PathBuf::from(format!("firstlight-custom-resources-{now}.json"));
    let list = json!({"apiVersion": "v1", "kind": "List", "items": items});
    let write = || {
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(PRIVATE)
            .open(&path)?;
        file.write_all(format!("{list:#}\n").as_bytes())?;
        file.sync_all()
    };
    match write() {
        Ok(()) => Ok(Some(path)),
        Err(error) => Err(Error::Io(path, error)),
    }
}

/// Returns the objects of a definition, in the version in which they are stored.
fn objects(client: &Client, definition: &Value) -> Result<Vec<Value>, client::Error> {
    let spec = &definition["spec"];
    let mut versions = spec["versions"].as_array().into_iter().flatten();
    let stored = versions.find(|it| it["storage"] == true && it["served"] == true);
    let version = stored.and_then(|it| it["name"].as_str());
    let fields = ["/group", "/names/plural", "/names/kind"];
    let [group, plural, kind] = fields.map(|at| spec.pointer(at).and_then(Value::as_str));
    let (Some(group), Some(version), Some(plural), Some(kind)) = (group, version, plural, kind)
    else {
        return Ok(vec![]); // no version of it is served: there is nothing to list
    };
    // the client wants names for the whole run of the program; a cluster has few definitions
    let [leaked, of_version, plural] = [group, version, plural].map(|it| &*it.to_owned().leak());
    let resource = Resource::cluster(leaked, of_version, plural);
    let found = match client.list(&resource.all(), &Selector::default()) {
        // it was deleted, or is not served yet
        Err(error) if error.code() == Some(404) => return Ok(vec![]),
        found => found?.items,
    };
    let version = format!("{group}/{version}");
    Ok(found
        .iter()
        .map(|object| restorable(object, &version, kind))
        .collect())
}

/// Returns an object without what the API server would refuse in a new one. Objects in a list have no
/// kind.
fn restorable(object: &Value, version: &str, kind: &str) -> Value {
    let mut object = object.clone();
    if let Some(metadata) = object["metadata"].as_object_mut() {
        metadata.retain(|name, _| !["managedFields", "resourceVersion", "uid"].contains(&&**name));
    }
    object["apiVersion"] = version.into();
    object["kind"] = kind.into();
    object
}
