//! The permissions of the person who runs a page's commands: those that the commands need, and no others. The commands are those that run with
//! stand-ins in place of the clients.

use std::collections::BTreeSet;
use std::fs;

use serde_json::Value;
use support::ROOT;

use super::page::Page;
use super::stop::Person;

/// What the commands of aws.md need beside the action of their name: to tag what they make, to give instances a role, and what AWS makes in an
/// account at the first load balancer and the first group of instances.
const FURTHER: [&str; 4] = [
    "ec2:CreateTags",
    "elasticloadbalancing:AddTags",
    "iam:CreateServiceLinkedRole",
    "iam:PassRole",
];

/// The actions of `aws .. wait`.
const WAITS: [(&str, &str); 7] = [
    ("image-available", "ec2:DescribeImages"),
    ("instance-", "ec2:DescribeInstances"),
    ("instance-profile", "iam:GetInstanceProfile"),
    (
        "load-balancer",
        "elasticloadbalancing:DescribeLoadBalancers",
    ),
    ("nat-gateway", "ec2:DescribeNatGateways"),
    ("snapshot", "ec2:DescribeSnapshots"),
    ("target", "elasticloadbalancing:DescribeTargetHealth"),
];

/// Returns what follows the program in each of its calls, up to the first option.
fn commands(page: &str, program: &str) -> BTreeSet<String> {
    let (person, page) = (Person::new(), Page::read(page));
    let calls: Vec<String> = page.blocks().flat_map(|block| person.run(&block)).collect();
    let own = calls
        .iter()
        .filter_map(|call| call.strip_prefix(program)?.strip_prefix(" ["));
    let found: BTreeSet<String> = own
        .map(|call| {
            let words = call.trim_end().trim_end_matches(']').split("] [");
            let words: Vec<&str> = words.take_while(|word| !word.starts_with('-')).collect();
            words.join(" ")
        })
        .collect();
    assert!(found.len() > 20, "{found:?}");
    found
}

/// Returns the permissions of the commands by operators.txt, each line of which must be used.
fn needed(page: &str, program: &str) -> BTreeSet<String> {
    let text = fs::read_to_string(format!("{ROOT}/tests/cloud_pages/operators.txt")).unwrap();
    let lines = text
        .lines()
        .filter_map(|line| line.strip_prefix(program)?.strip_prefix(' '));
    let table: Vec<(&str, &str)> = lines.map(|line| line.split_once(':').unwrap()).collect();
    let (mut used, mut needed) = (BTreeSet::new(), BTreeSet::new());
    for command in commands(page, program) {
        let of_command =
            |line: &&(&str, &str)| format!("{command} ").starts_with(&format!("{} ", line.0));
        let found = table
            .iter()
            .filter(of_command)
            .max_by_key(|line| line.0.len());
        let (name, actions) =
            found.unwrap_or_else(|| panic!("operators.txt has no {program} {command}"));
        used.insert(*name);
        needed.extend(actions.split_whitespace().map(str::to_owned));
    }
    let unused: Vec<_> = table.iter().filter(|line| !used.contains(line.0)).collect();
    assert!(unused.is_empty(), "no command of the page: {unused:?}");
    needed
}

fn file(name: &str) -> String {
    fs::read_to_string(format!("{ROOT}/docs/clouds/{name}")).unwrap()
}

fn list(value: &Value) -> BTreeSet<String> {
    let all = value.as_array().unwrap().iter();
    all.map(|it| it.as_str().unwrap().to_owned()).collect()
}

/// Returns the action of a command of `aws`, such as `ec2:CreateVpc` of `ec2 create-vpc`.
fn action(command: &str) -> Option<String> {
    let words: Vec<&str> = command.split(' ').collect();
    if words[1] == "wait" {
        let fits = |line: &&(&str, &str)| words[2].starts_with(line.0);
        let (_, action) = WAITS
            .iter()
            .filter(fits)
            .max_by_key(|line| line.0.len())
            .unwrap();
        return Some((*action).to_owned());
    }
    let service = match words[0] {
        // AWS allows `sts get-caller-identity` to all; `configure` sends no request
        "configure" | "sts" => return None,
        "elbv2" => "elasticloadbalancing",
        service => service,
    };
    let parts = words[1]
        .split('-')
        .map(|word| word[..1].to_uppercase() + &word[1..]);
    Some(format!("{service}:{}", parts.collect::<String>()))
}

#[test]
fn the_policy_for_the_operator_of_aws_has_what_the_page_calls_and_no_more() {
    let mut needed: BTreeSet<String> = commands("aws", "aws")
        .iter()
        .filter_map(|it| action(it))
        .collect();
    needed.extend(FURTHER.map(str::to_owned));
    let policy: Value = serde_json::from_str(&file("aws-operator.json")).unwrap();
    let statements = policy["Statement"].as_array().unwrap();
    let given: BTreeSet<String> = statements
        .iter()
        .flat_map(|it| list(&it["Action"]))
        .collect();
    assert_eq!(given, needed);
    // only for what the page names so
    for statement in statements {
        if list(&statement["Action"])
            .iter()
            .any(|action| action.starts_with("iam:"))
        {
            for resource in list(&statement["Resource"]) {
                let (_, name) = resource.split_once('/').unwrap();
                assert!(
                    name.starts_with("firstlight-") || name.starts_with("aws-service-role/"),
                    "{resource}"
                );
            }
        }
    }
}

#[test]
fn the_role_for_the_operator_of_azure_has_what_the_page_calls_and_no_more() {
    let role: Value = serde_json::from_str(&file("azure-operator.json")).unwrap();
    assert_eq!(list(&role["Actions"]), needed("azure", "az"));
    assert_eq!(role["NotActions"].as_array().unwrap().len(), 0);
}

#[test]
fn the_role_for_the_operator_of_google_cloud_has_what_the_page_calls_and_no_more() {
    let role = file("gcp-operator.yaml");
    let given: BTreeSet<String> = role
        .lines()
        .filter_map(|line| line.strip_prefix("  - "))
        .map(str::to_owned)
        .collect();
    assert_eq!(given, needed("gcp", "gcloud"));
}

/// The page has a table of roles, and what each is for.
#[test]
fn the_page_of_openstack_names_a_role_for_each_kind_of_command() {
    let page = file("openstack.md");
    let (_, table) = page.split_once("| role | for |").unwrap();
    let rows = table
        .lines()
        .skip(2)
        .take_while(|line| line.starts_with('|'));
    let kinds: BTreeSet<String> = rows
        .flat_map(|row| row.split('|').nth(2).unwrap().split('`').skip(1).step_by(2))
        .map(str::to_owned)
        .collect();
    let mut used = BTreeSet::new();
    // this one reads the client's own settings
    for command in commands("openstack", "openstack")
        .iter()
        .filter(|it| !it.starts_with("configuration"))
    {
        let found = kinds
            .iter()
            .find(|kind| command.starts_with(&format!("{kind} ")));
        used.insert(
            found
                .unwrap_or_else(|| panic!("no role is for {command}"))
                .clone(),
        );
    }
    assert_eq!(used, kinds);
}
