//! The modules below infra/. OpenTofu checks them, and what it plans is what the commands of the cloud's page make: both become lines of
//! text, which a test compares.

pub mod aws;
pub mod azure;
pub mod gcp;
pub mod libvirt;
pub mod openstack;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use support::ROOT;
use support::boot_image::run;
use support::foreign::fetched;
use tempfile::TempDir;

use super::page::Page;

/// What is made, one line of text for each thing.
pub type Facts = BTreeSet<String>;

/// A copy of a module, in which OpenTofu works.
pub struct Module {
    folder: TempDir,
    name: &'static str,
}

/// The genuine provider, or for AWS, Azure and Google Cloud one that has only its schema; or always the latter, which gives names to what
/// a plan does not know.
#[derive(Clone, Copy, PartialEq)]
enum Provider {
    Usual,
    Names,
}

impl Module {
    pub fn new(name: &'static str) -> Module {
        let module = Module {
            folder: tempfile::tempdir().unwrap(),
            name,
        };
        let root = module.folder.path();
        fs::create_dir_all(module.path()).unwrap();
        for file in fs::read_dir(format!("{ROOT}/infra/{name}")).unwrap() {
            let file = file.unwrap().path();
            // not the values and the state of a developer's own cluster
            if file
                .extension()
                .is_some_and(|it| it == "tf" || it == "xslt")
            {
                fs::copy(&file, module.path().join(file.file_name().unwrap())).unwrap();
            }
        }
        // the permissions
        symlink(format!("{ROOT}/docs"), root.join("docs")).unwrap();
        let schema = match name {
            "openstack" | "libvirt" => None,
            "azure" => Some("azurerm"),
            "gcp" => Some("google"),
            name => Some(name),
        };
        if let Some(schema) = schema {
            let bindings = fetched("opentofu.sh").join(format!("bindings/{schema}.tgz"));
            let text = run(Command::new("python3")
                .arg(format!("{ROOT}/tests/cloud_pages/schemas.py"))
                .arg(bindings)
                .arg(module.path()));
            fs::write(root.join(format!("{schema}.json")), text).unwrap();
        }
        module.tofu(Provider::Usual, &["init", "-input=false"]);
        module
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("infra").join(self.name)
    }

    /// Runs OpenTofu in the module's folder; returns what it prints.
    fn tofu(&self, provider: Provider, arguments: &[&str]) -> String {
        let mut command = Command::new(fetched("opentofu.sh").join("bin/tofu"));
        command.args(arguments);
        self.environment(provider, &mut command);
        run(&mut command)
    }

    /// Gives a command what OpenTofu needs in this folder.
    fn environment(&self, provider: Provider, command: &mut Command) {
        let programs = fetched("opentofu.sh");
        let mirror = match provider {
            Provider::Usual => "plugins",
            Provider::Names => "schemas",
        };
        let settings = self.folder.path().join("tofu.rc");
        let text = format!(
            "provider_installation {{\n  filesystem_mirror {{\n    path = {:?}\n  }}\n}}\n",
            programs.join(mirror)
        );
        fs::write(&settings, text).unwrap();
        command
            .current_dir(self.path())
            .env("TF_CLI_CONFIG_FILE", settings)
            .env("TF_IN_AUTOMATION", "1")
            .env("TF_CLI_ARGS", "-no-color")
            // the provider of OpenStack connects only for an `apply`
            .envs([
                ("OS_AUTH_URL", "http://127.0.0.1:9/v3"),
                ("OS_USERNAME", "nobody"),
                ("OS_PASSWORD", "none"),
                ("OS_TENANT_NAME", "none"),
                ("OS_USER_DOMAIN_NAME", "none"),
            ])
            .env("SCHEMAS", self.folder.path());
        if provider == Provider::Names {
            command.env("NAMES", "1");
        }
    }

    /// Lets OpenTofu check the module against the provider's schema.
    pub fn validate(&self) {
        let said: Value =
            serde_json::from_str(&self.tofu(Provider::Usual, &["validate", "-json"])).unwrap();
        assert_eq!(said["diagnostics"], json!([]), "{}: {said:#}", self.name);
    }

    /// Lets OpenTofu plan what it would make with these values of variables, without a cloud.
    pub fn plan(&self, variables: &Value) -> Plan {
        self.plan_with(Provider::Usual, variables)
    }

    /// Returns the plan with the names of resources in place of their IDs, which only the cloud assigns.
    pub fn plan_with_names(&self, variables: &Value) -> Plan {
        if self.name == "openstack" {
            let said = self.tofu(Provider::Usual, &["providers", "schema", "-json"]);
            let said: Value = serde_json::from_str(&said).unwrap();
            let schemas = said["provider_schemas"].as_object().unwrap().values();
            let schema = schemas.into_iter().next().unwrap().to_string();
            fs::write(self.folder.path().join("openstack.json"), schema).unwrap();
        }
        for made in [".terraform", ".terraform.lock.hcl"] {
            run(Command::new("rm").arg("-r").arg(self.path().join(made)));
        }
        self.tofu(Provider::Names, &["init", "-input=false"]);
        self.plan_with(Provider::Names, variables)
    }

    fn plan_with(&self, provider: Provider, variables: &Value) -> Plan {
        let file = self.folder.path().join("variables.tfvars.json");
        fs::write(&file, variables.to_string()).unwrap();
        let file = format!("-var-file={}", file.display());
        let arguments = ["plan", "-input=false", "-refresh=false", "-out=plan", &file];
        self.tofu(provider, &arguments);
        Plan::read(&self.tofu(provider, &["show", "-json", "plan"]))
    }
}

/// A line of a table: a command of a page or a type of resource, and the fact that it makes. In the fact stand for values: `{}` the last
/// word of the command, `{x}` an option or an attribute, `{x.0.y}` one in a block, `{>x}` the name of the resource to which it refers.
/// Several values are sorted; with `{*x}` each makes a fact of its own.
type Line = (&'static str, &'static str);

/// Returns the facts that a template makes of values.
fn fill(template: &str, value: &impl Fn(&str) -> Vec<String>) -> Facts {
    let Some((before, rest)) = template.split_once('{') else {
        return Facts::from([template.to_owned()]);
    };
    let (name, after) = rest.split_once('}').unwrap();
    let mut values = value(name.trim_start_matches('*'));
    values.sort();
    if !name.starts_with('*') {
        values = vec![values.join(",")];
    }
    let ends = fill(after, value);
    let all = values
        .iter()
        .flat_map(|value| ends.iter().map(move |end| format!("{before}{value}{end}")));
    all.collect()
}

/// What OpenTofu would make.
pub struct Plan(Value);

impl Plan {
    /// Reads what `tofu show -json` prints. The values of each resource get its name in the module, `module-name`.
    fn read(text: &str) -> Plan {
        let mut plan: Value = serde_json::from_str(text).unwrap();
        let resources = plan["planned_values"]["root_module"]["resources"].as_array_mut();
        for one in resources.unwrap() {
            one["values"]["module-name"] = one["name"].take();
            one["values"]["module-index"] = one["index"].take();
        }
        Plan(plan)
    }

    /// Returns the values of the resources of a type.
    fn values(&self, kind: &str) -> impl Iterator<Item = &Value> {
        let resources = self.0["planned_values"]["root_module"]["resources"].as_array();
        let resources = resources.unwrap().iter();
        let found = resources.filter(move |it| it["type"] == kind);
        found.map(|it| &it["values"])
    }

    /// Checks that the plan does only these things with the resources.
    fn only(&self, allowed: &[&str]) {
        let changes = self.0["resource_changes"].as_array().unwrap();
        assert!(!changes.is_empty());
        for one in changes {
            let actions = texts(&one["change"]["actions"]).join(" ");
            assert!(
                allowed.contains(&&*actions),
                "{}: {actions}",
                one["address"]
            );
        }
    }

    /// Changes the values of each resource of a type, so that a line of a table can name them.
    fn edit(&mut self, kind: &str, mut change: impl FnMut(&mut Value)) {
        let resources = self.0["planned_values"]["root_module"]["resources"].as_array_mut();
        let resources = resources.unwrap().iter_mut();
        for one in resources.filter(|it| it["type"] == kind) {
            change(&mut one["values"]);
        }
    }

    fn output(&self, name: &str) -> &str {
        let output = &self.0["planned_values"]["outputs"][name]["value"];
        output.as_str().unwrap()
    }

    /// Returns the facts of a table. Each type of its lines must exist, and no other one.
    fn facts(&self, table: &[Line]) -> Facts {
        let mut facts = Facts::from([init(self.output("init"), self.output("endpoint"))]);
        for (kind, template) in table {
            for resource in self.values(kind) {
                facts.extend(fill(template, &|name| attribute(resource, name)));
            }
        }
        let resources = self.0["planned_values"]["root_module"]["resources"].as_array();
        let kinds = resources
            .unwrap()
            .iter()
            .map(|it| it["type"].as_str().unwrap());
        let known = table.iter().map(|line| line.0);
        assert_eq!(BTreeSet::from_iter(kinds), known.collect());
        facts
    }
}

/// Returns the values of an attribute.
fn attribute(resource: &Value, name: &str) -> Vec<String> {
    let (is_reference, path) = match name.strip_prefix('>') {
        Some(path) => (true, path),
        None => (false, name),
    };
    let found = path
        .split('.')
        .fold(resource, |value, part| match part.parse::<usize>() {
            Ok(number) => &value[number],
            Err(_) => &value[part],
        });
    let mut all = texts(found);
    for text in all.iter_mut().filter(|_| is_reference) {
        *text = referred(text).to_owned();
    }
    all
}

/// Returns the texts in a value of a plan.
fn texts(value: &Value) -> Vec<String> {
    match value {
        Value::Null => vec![],
        Value::String(text) => vec![text.clone()],
        Value::Array(all) => all.iter().flat_map(texts).collect(),
        Value::Object(all) => {
            let all = all
                .iter()
                .map(|(name, value)| (name, texts(value).join(",")));
            let given = all.filter(|(_, text)| !text.is_empty());
            given.map(|(name, text)| format!("{name}={text}")).collect()
        }
        other => vec![other.to_string()],
    }
}

/// Returns the name of the resource to which a value of a plan with names refers: TYPE|NAME|ATTRIBUTE.
fn referred(text: &str) -> &str {
    text.split('|')
        .nth(1)
        .unwrap_or_else(|| panic!("{text} refers to no resource"))
}

/// A command of a page, as the client got it.
pub struct Call {
    /// The words before the first option.
    pub words: String,
    options: BTreeMap<String, Vec<String>>,
}

impl Call {
    /// Reads the file of the clients' stand-ins.
    pub fn all(path: &Path) -> Vec<Call> {
        let text = fs::read_to_string(path).unwrap();
        let lines = text
            .lines()
            .map(|line| serde_json::from_str::<Vec<String>>(line).unwrap());
        lines.map(Call::new).collect()
    }

    fn new(arguments: Vec<String>) -> Call {
        let (mut words, mut options, mut last) = (vec![], BTreeMap::<_, Vec<_>>::new(), None);
        for argument in arguments {
            let short = argument.strip_prefix('-').filter(|it| it.len() == 1);
            match (argument.strip_prefix("--").or(short), &last) {
                (Some(option), _) => {
                    let (name, value) = match option.split_once('=') {
                        Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
                        None => (option.to_owned(), None),
                    };
                    options.entry(name.clone()).or_default().extend(value);
                    last = Some(name);
                }
                (None, Some(name)) => options.get_mut(name).unwrap().push(argument),
                (None, None) => words.push(argument),
            }
        }
        Call {
            words: words.join(" "),
            options,
        }
    }

    /// Returns the values of an option.
    fn values(&self, option: &str) -> &[String] {
        self.options.get(option).map_or(&[], Vec::as_slice)
    }

    /// Returns the facts of a table. A command that is not in it must only show or delete something, or begin like one of `others`.
    fn facts(&self, table: &[Line], others: &[&str]) -> Facts {
        let mut facts = Facts::new();
        let mut words = self.words.split([' ', '-']);
        let mut is_known = words.any(|word| READING.contains(&word))
            || others.iter().any(|it| self.words.starts_with(it));
        for (words, template) in table {
            let last = match self.words.strip_prefix(words) {
                Some("") => "",
                Some(rest) if rest.starts_with(' ') && !rest[1..].contains(' ') => &rest[1..],
                _ => continue,
            };
            is_known = true;
            facts.extend(fill(template, &|name| match name {
                "" => vec![last.to_owned()],
                name => self.parts(name),
            }));
        }
        assert!(is_known, "no line of the table has {:?}", self.words);
        facts
    }

    /// Returns the values of an option, those with commas as several.
    fn parts(&self, option: &str) -> Vec<String> {
        match self.options.get(option) {
            Some(values) if values.is_empty() => vec!["true".to_owned()],
            Some(values) => values
                .iter()
                .flat_map(|it| it.split(','))
                .map(str::to_owned)
                .collect(),
            None => vec![],
        }
    }
}

/// Words of commands that show or delete something.
const READING: &[&str] = &[
    "configuration",
    "console",
    "delete",
    "describe",
    "get",
    "list",
    "remove",
    "show",
];

/// Returns the `firstlight init` of a page or of a module with an endpoint, in one line.
fn init(text: &str, endpoint: &str) -> String {
    let (_, command) = text.split_once("firstlight init ").unwrap();
    let mut all = String::new();
    for line in command.lines() {
        match line.trim().strip_suffix('\\') {
            Some(line) => all += line,
            None => {
                all += line.trim();
                break;
            }
        }
    }
    format!("init {}", all.replace(endpoint, "ENDPOINT"))
}

/// Returns the `firstlight init` of a page.
pub fn init_of_page(page: &str) -> String {
    let page = Page::read(page);
    let texts: Vec<_> = page.blocks().map(|block| block.text).collect();
    let found = texts.iter().find(|text| text.contains("firstlight init "));
    // the page stops if a variable is empty
    let text = found.unwrap().replace("${", "$").replace(":?}", "");
    init(&text, "\"$ENDPOINT\"")
}

/// Checks that a page and its module make the same.
fn compare(name: &str, page: &Facts, module: &Facts) {
    assert!(page.len() > 20, "{page:#?}");
    let only = |one: &Facts, other| {
        let lines: Vec<_> = one.difference(other).map(String::as_str).collect();
        lines.join("\n")
    };
    let (of_page, of_module) = (only(page, module), only(module, page));
    assert!(
        of_page.is_empty() && of_module.is_empty(),
        "docs/clouds/{name}.md and infra/{name} differ.\nOnly the page has:\n{of_page}\nOnly the module has:\n{of_module}"
    );
}

/// Values for the variables of each module, of more machines than the first one.
fn examples() -> [(&'static str, Value); 5] {
    let hash = "$2b$12$hash";
    [
        (
            "aws",
            json!({"cluster": "c1", "region": "us-east-2", "image": "ami-1", "operators": ["203.0.113.7/32", "2.0.0.0/8"],
                "init_secret_hash": hash, "control_planes": 3, "workers": 2}),
        ),
        (
            "azure",
            json!({"cluster": "c1", "subscription": "s", "region": "westeurope", "image": "/i", "operators": ["203.0.113.7/32"],
                "unused_key": "ssh-ed25519 AAAA"}),
        ),
        (
            "gcp",
            json!({"cluster": "cluster1", "project": "p", "region": "europe-west3", "init_secret_hash": hash, "control_planes": 5,
                "workers": 2}),
        ),
        (
            "openstack",
            json!({"cluster": "c1", "auth_url": "https://keystone.example.com:5000/v3", "region": "RegionOne", "image": "i",
                "flavor": "m1.large", "outside_id": "o", "operators": ["203.0.113.7/32"], "init_secret_hash": hash,
                "control_planes": 3, "workers": 2}),
        ),
        (
            "libvirt",
            json!({"init_secret_hash": hash, "control_planes": 3, "workers": 2}),
        ),
    ]
}

#[test]
#[ignore = "builds OpenTofu: make cloud-pages"]
fn opentofu_accepts_each_module() {
    for (name, mut variables) in examples() {
        let module = Module::new(name);
        module.tofu(Provider::Usual, &["fmt", "-check", "-diff"]);
        module.validate();
        // the provider of libvirt connects to it for a plan
        if name == "libvirt" {
            continue;
        }
        module.plan(&variables);
        // the hash is taken away after `firstlight init`
        variables["init_secret_hash"] = Value::Null;
        let planned = module.plan(&variables).0["planned_values"].to_string();
        assert!(!planned.contains("init-secret-hash"), "{name}: {planned}");
    }
}
