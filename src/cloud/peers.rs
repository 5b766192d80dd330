//! Hosts with join services that an operator names: in a setting, or in the tag [`TAG`] of the
//! machine. The machine's own metadata service returns the tag by plain HTTP and without
//! credentials. The answer is not authenticated: the host controls each answer of a cloud.

use base::machines::{Error, is_host};
use serde::Deserialize;

use super::http::{Http, MAX_BODY, check_url};

/// The name of the tag.
pub const TAG: &str = "firstlight-peers";
/// Maximum number of hosts.
pub const MAX_HOSTS: usize = 64;

/// The addresses of the metadata services: one for AWS, Google and Azure over IPv4, then AWS's and Google's over IPv6. A machine
/// without IPv4 reaches the last two at most.
const ADDRESSES: &str = "http://169.254.169.254 http://[fd00:ec2::254] http://[fd20:ce::254]";

/// Asks a metadata service for the tag of this machine.
pub type RequestTag = fn(&Http) -> Result<Vec<u8>, Error>;

/// Parses a list of host names and addresses, separated by commas or white space. The error is a
/// clause that says what is wrong.
pub fn parse_hosts(text: &str) -> Result<Vec<String>, String> {
    let words = text.split(|c: char| c == ',' || c.is_ascii_whitespace());
    let hosts: Vec<_> = words.filter(|word| !word.is_empty()).collect();
    if hosts.is_empty() || hosts.len() > MAX_HOSTS {
        let got = hosts.len();
        return Err(format!("it has {got} hosts, expected 1 to {MAX_HOSTS}"));
    }
    match hosts.iter().find(|host| !is_host(host)) {
        Some(bad) => Err(format!(
            "{bad:.80?} is neither an IP address nor a DNS name"
        )),
        None => Ok(hosts.into_iter().map(str::to_owned).collect()),
    }
}

/// The tag of this machine, from its metadata service.
pub struct MachineTag {
    metadata: Http,
    ask: RequestTag,
}

impl MachineTag {
    /// Makes a client of the metadata service at this location, in the form of `--metadata`. URLs
    /// of APIs in it are ignored.
    pub fn new(ask: RequestTag, place: Option<&str>) -> Result<MachineTag, Error> {
        let first = place.and_then(|place| place.split(',').next());
        let named = first.filter(|url| !url.is_empty() && !url.contains('='));
        named.map_or(Ok(()), check_url)?;
        Ok(MachineTag {
            metadata: Http::new(named.unwrap_or(ADDRESSES)),
            ask,
        })
    }

    /// Returns the hosts in the tag.
    pub fn hosts(&self) -> Result<Vec<String>, Error> {
        let request = || format!("GET {}", self.metadata.base());
        let answer = (self.ask)(&self.metadata).map_err(|error| match error {
            Error::Status { status: 404, .. } => absent(request()),
            other => other,
        })?;
        let text = String::from_utf8_lossy(&answer);
        match text.trim() {
            "" => Err(absent(request())),
            text => parse_hosts(text).map_err(|got| Error::Nonsense {
                request: request(),
                expected: "hosts in the tag firstlight-peers",
                got,
            }),
        }
    }
}

fn absent(request: String) -> Error {
    Error::Denied {
        request,
        why: format!("this machine has no tag {TAG}"),
        next: "set it to the names or addresses of control planes or their load balancer".into(),
    }
}

/// Asks AWS: the tags must be in the instance's metadata (`InstanceMetadataTags=enabled`).
pub(super) fn aws(metadata: &Http) -> Result<Vec<u8>, Error> {
    let lifetime = [("X-aws-ec2-metadata-token-ttl-seconds", "60")];
    let token = metadata.put("latest/api/token", &lifetime);
    let token = token.map_err(no_tokens)?;
    let token = String::from_utf8_lossy(&token);
    let fields = [("X-aws-ec2-metadata-token", &*token)];
    let path = format!("latest/meta-data/tags/instance/{TAG}");
    metadata.get(&path, &fields, MAX_BODY)
}

/// Changes a 404 for an AWS token into another error: callers treat a 404 as a missing tag, role or
/// network.
pub fn no_tokens(error: Error) -> Error {
    match error {
        Error::Status {
            request,
            status: 404,
            ..
        } => Error::Denied {
            request,
            why: "status 404: the service gives no tokens".into(),
            next: "the metadata service of an instance (IMDSv2) must be at this address".into(),
        },
        other => other,
    }
}

/// Asks Google Cloud: the tag is a value in the instance's own metadata.
pub(super) fn gcp(metadata: &Http) -> Result<Vec<u8>, Error> {
    let path = format!("computeMetadata/v1/instance/attributes/{TAG}");
    metadata.get(&path, &[("Metadata-Flavor", "Google")], MAX_BODY)
}

/// Asks Azure.
pub(super) fn azure(metadata: &Http) -> Result<Vec<u8>, Error> {
    #[derive(Deserialize)]
    struct Entry {
        name: String,
        value: String,
    }
    let path = "metadata/instance/compute/tagsList?api-version=2021-02-01&format=json";
    let fields = [("Metadata", "true")];
    let tags: Vec<Entry> = metadata.get_json(path, &fields, "a list of tags")?;
    let found = tags
        .into_iter()
        .find(|tag| tag.name.eq_ignore_ascii_case(TAG));
    Ok(found.map_or(vec![], |tag| tag.value.into_bytes()))
}

/// Asks OpenStack: the user data has the load balancer under Constellation's name for it.
pub(super) fn openstack(metadata: &Http) -> Result<Vec<u8>, Error> {
    // the user data also has credentials, which are not read
    #[derive(Deserialize)]
    #[serde(rename_all = "kebab-case")]
    struct UserData {
        firstlight_peers: Option<String>,
        openstack_load_balancer_endpoint: Option<String>,
    }
    let path = "openstack/2018-08-27/user_data";
    let body = metadata.get(path, &[], MAX_BODY)?;
    let data: UserData = serde_json::from_slice(&body).map_err(|error| Error::Nonsense {
        request: format!("GET {}", metadata.url(path)),
        expected: "user data in JSON",
        // leave out the text of the error: it may contain a password
        got: format!("an error in line {}", error.line()),
    })?;
    let found = data
        .firstlight_peers
        .or(data.openstack_load_balancer_endpoint);
    Ok(found.unwrap_or_default().into_bytes())
}

#[cfg(test)]
mod tests {
    use support::mutation::mutations;

    use super::*;

    #[test]
    fn hosts_stand_between_commas_or_spaces() {
        let hosts = parse_hosts("cluster.example, 10.0.0.1\t2001:db8::1,,").unwrap();
        assert_eq!(hosts, ["cluster.example", "10.0.0.1", "2001:db8::1"]);
        let many = vec!["a"; MAX_HOSTS + 1].join(",");
        for (bad, why) in [
            ("", "0 hosts"),
            (" , ", "0 hosts"),
            (&many, "65 hosts"),
            ("a,http://b", "neither an IP address nor a DNS name"),
        ] {
            assert!(parse_hosts(bad).unwrap_err().contains(why), "{bad}");
        }
        let mut good = 0;
        for text in mutations(b"cluster.example,10.0.0.1", 10_000) {
            if let Ok(hosts) = parse_hosts(&String::from_utf8_lossy(&text)) {
                good += 1;
                assert!(hosts.iter().all(|host| is_host(host)));
            }
        }
        assert!(good > 100, "{good}");
    }

    #[test]
    fn the_place_of_apis_is_none_of_the_metadata_service() {
        let base = |place| MachineTag::new(aws, place).map(|tag| tag.metadata.base().to_owned());
        for (place, expected) in [
            (None, "http://169.254.169.254"),
            (Some("ec2=https://a"), "http://169.254.169.254"),
            (Some(",ec2=https://a"), "http://169.254.169.254"),
            (
                Some("http://10.0.0.1:80,ec2=https://a"),
                "http://10.0.0.1:80",
            ),
        ] {
            assert_eq!(base(place).unwrap(), expected);
        }
        assert!(base(Some("10.0.0.1")).is_err());
    }
}
