//! The instance's metadata service in its second version (IMDSv2), and signed requests to the APIs of the region.

use base::sync::lock;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use base::machines::Error;
use cloud::http::{AWS, Http, MAX_BODY, PlainResponse, check_url, excerpt};
use cloud::peers::no_tokens;
use http::form;
use serde::Deserialize;
use zeroize::Zeroizing;

use super::credentials::{
    self, AwsSigner, Credentials, EARLY, Unsigned, Variables, is_region, parse_credentials,
};
use super::error::{advice, is_of_credentials, is_throttling, parse_error};
use super::sigv4;
use crate::answer::nonsense;

/// The names by which `--metadata` replaces the address of an API.
const APIS: [&str; 3] = ["ec2", "elb", "tagging"];
/// Lifetime in seconds that is requested for a token of the metadata service: the longest that it allows.
const TOKEN_LIFETIME: u64 = 21_600;
/// If this machine's clock deviates by more seconds, a failed request is repeated with the time of the APIs. They accept five minutes.
const MAX_SKEW: i64 = 120;

/// A client of the services. A call sends one request for each page, and further ones if it needs a new token or new credentials.
pub struct SignedClient {
    imds: Http,
    /// The addresses of the services, as `--metadata` has them.
    place: String,
    token: Mutex<Option<(Zeroizing<String>, Instant)>>,
    credentials: Mutex<Option<Arc<Credentials>>>,
    identity: OnceLock<InstanceIdentity>,
    apis: OnceLock<Apis>,
    /// The environment variables that override the instance's role and region. A node uses none.
    variables: Option<Variables>,
    region: OnceLock<String>,
    /// How many seconds the clock of the APIs is ahead of this machine's.
    skew: Mutex<i64>,
}

/// The APIs of a region.
pub struct Apis {
    /// EC2.
    pub ec2: Http,
    /// Elastic Load Balancing.
    pub elb: Http,
    /// The tags of resources.
    pub tagging: Http,
}

/// The content of the instance identity document.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct InstanceIdentity {
    /// The ID of the instance.
    pub instance_id: String,
    /// The region, e.g. `eu-central-1`.
    pub region: String,
    /// The zone, e.g. `eu-central-1a`.
    pub availability_zone: String,
    /// The first IPv4 address; `None` in a subnet of IPv6 only.
    #[serde(default)]
    pub private_ip: Option<String>,
}

/// Why a call failed.
pub struct Failed {
    /// The API's code; empty without one.
    pub code: String,
    /// Whether the same request may soon succeed.
    pub is_later: bool,
    /// The sentence for a person, which contains the code.
    pub error: Error,
}

impl From<Error> for Failed {
    fn from(error: Error) -> Failed {
        let is_later = match &error {
            Error::Unreachable { .. } => true,
            Error::Status { status, .. } => *status == 429 || *status >= 500,
            _ => false,
        };
        Failed {
            code: String::new(),
            is_later,
            error,
        }
    }
}

/// A request to an API.
pub struct ApiCall<'a> {
    /// The service, as the signature names it.
    pub service: &'static str,
    /// The permission that the caller needs.
    pub permission: &'static str,
    /// The type of the body.
    pub content_type: &'static str,
    /// The operation, if the body does not name it.
    pub target: Option<&'static str>,
    /// The body, which has the parameters.
    pub body: &'a str,
    /// Maximum size of the answer in bytes.
    pub limit: u64,
}

impl SignedClient {
    /// Makes a client of the services at these addresses: `[URL][,ec2=URL][,elb=URL][,tagging=URL]`. Sends no request.
    pub fn new(place: Option<&str>) -> Result<SignedClient, Error> {
        let place = place.unwrap_or_default();
        let service = part(place, "");
        service.map_or(Ok(()), check_url)?;
        Ok(SignedClient {
            imds: Http::new(service.unwrap_or(AWS)),
            place: place.to_owned(),
            token: Mutex::default(),
            credentials: Mutex::default(),
            identity: OnceLock::new(),
            apis: OnceLock::new(),
            variables: None,
            region: OnceLock::new(),
            skew: Mutex::new(0),
        })
    }

    /// Makes a client for a program that runs on no node: environment variables may give it the credentials, the region, and the
    /// addresses that `place` does not have. Sends no request.
    pub fn of_caller(place: Option<&str>, variables: Variables) -> Result<SignedClient, Error> {
        let imds = variables(credentials::IMDS).filter(|url| !url.is_empty());
        let place = place.or(imds.as_deref());
        Ok(SignedClient {
            variables: Some(variables),
            ..SignedClient::new(place)?
        })
    }

    /// Returns the credentials for the next signature.
    pub fn signer(&self) -> Result<AwsSigner, Unsigned> {
        let absent = |error: Error| Unsigned::Absent(error.to_string());
        match self.variables {
            None => self.credentials().map(AwsSigner::Role).map_err(absent),
            Some(variables) => AwsSigner::find(variables, || self.credentials()),
        }
    }

    /// Returns the region whose APIs get the requests.
    pub fn region(&self) -> Result<&str, Error> {
        if let Some(region) = self.region.get() {
            return Ok(region);
        }
        let named = self.variables.map_or(Ok(None), credentials::region);
        let region = match named.map_err(|error| Error::Refused(error.to_string()))? {
            Some(region) => region,
            None => self.identity()?.region.clone(),
        };
        Ok(self.region.get_or_init(|| region))
    }

    /// Returns the metadata service's answer for a path below `/latest`. If the token is no longer valid, it is renewed once.
    pub fn imds(&self, path: &str) -> Result<Vec<u8>, Error> {
        let path = format!("latest/{path}");
        let get = |token: &str| {
            let fields = [("X-aws-ec2-metadata-token", token)];
            self.imds.get(&path, &fields, MAX_BODY)
        };
        match get(&self.token()?) {
            Err(Error::Status { status: 401, .. }) => {
                *lock(&self.token) = None;
                get(&self.token()?)
            }
            other => other,
        }
    }

    /// Returns a token of the metadata service.
    fn token(&self) -> Result<Zeroizing<String>, Error> {
        let mut token = lock(&self.token);
        let lifetime = Duration::from_secs(TOKEN_LIFETIME) - EARLY;
        if let Some((token, since)) = token.as_ref()
            && since.elapsed() < lifetime
        {
            return Ok(token.clone());
        }
        let fields = [(
            "X-aws-ec2-metadata-token-ttl-seconds",
            &*TOKEN_LIFETIME.to_string(),
        )];
        let answer = self.imds.put("latest/api/token", &fields);
        let answer = answer.map_err(|error| match error {
            Error::Unreachable { request, error } => Error::Denied {
                request,
                why: error,
                next: "the instance needs the metadata options HttpEndpoint=enabled, in a subnet of IPv6 only HttpProtocolIpv6=enabled, and in a pod a hop limit of 2".into(),
            },
            other => no_tokens(other),
        })?;
        let is_visible = answer.iter().all(u8::is_ascii_graphic) && !answer.is_empty();
        let text = String::from_utf8(answer).ok().filter(|_| is_visible);
        let new = Zeroizing::new(text.ok_or_else(|| Error::Nonsense {
            request: format!("PUT {}", self.imds.url("latest/api/token")),
            expected: "a token",
            got: "bytes that cannot be in a header field".into(),
        })?);
        *token = Some((new.clone(), Instant::now()));
        Ok(new)
    }

    /// Returns the identity of this instance, which never changes.
    pub fn identity(&self) -> Result<&InstanceIdentity, Error> {
        if let Some(identity) = self.identity.get() {
            return Ok(identity);
        }
        const PATH: &str = "dynamic/instance-identity/document";
        let document = self.imds(PATH)?;
        let identity = parse_identity(&self.imds_request(PATH), &document)?;
        Ok(self.identity.get_or_init(|| identity))
    }

    /// Returns the value of a tag of this instance.
    pub fn tag(&self, name: &str) -> Result<Vec<u8>, Error> {
        let path = format!("meta-data/tags/instance/{name}");
        self.imds(&path).map_err(|error| match error {
            Error::Status {
                request,
                status: 404,
                ..
            } => Error::Denied {
                request,
                why: "the instance's metadata does not have this tag".into(),
                next: format!(
                    "set the tag {name} and the metadata option InstanceMetadataTags=enabled"
                ),
            },
            other => other,
        })
    }

    /// Describes the request for a path below `/latest` in an error.
    pub fn imds_request(&self, path: &str) -> String {
        format!("GET {}", self.imds.url(&format!("latest/{path}")))
    }

    /// Returns credentials of the instance's role that stay valid for some minutes.
    pub fn credentials(&self) -> Result<Arc<Credentials>, Error> {
        const PATH: &str = "meta-data/iam/security-credentials/";
        let mut known = lock(&self.credentials);
        if let Some(known) = known.as_ref().filter(|known| known.last(self.now())) {
            return Ok(known.clone());
        }
        let no_role = |error| match error {
            Error::Status {
                request,
                status: 404,
                ..
            } => Error::Denied {
                request,
                why: "the instance has no role".into(),
                next: "attach an instance profile with the role of docs/clouds.md".into(),
            },
            other => other,
        };
        let role = self.imds(PATH).map_err(no_role)?;
        let role = name(&self.imds_request(PATH), "the name of a role", &role)?;
        let path = format!("{PATH}{role}");
        let answer = Zeroizing::new(self.imds(&path).map_err(no_role)?);
        let mut new = parse_credentials(&self.imds_request(&path), &answer)?;
        new.role = role;
        let new = Arc::new(new);
        *known = Some(new.clone());
        Ok(new)
    }

    /// Returns the time by the clock of the APIs.
    fn now(&self) -> SystemTime {
        let skew = *lock(&self.skew);
        let by = Duration::from_secs(skew.unsigned_abs());
        let now = SystemTime::now();
        let shifted = if skew < 0 {
            now.checked_sub(by)
        } else {
            now.checked_add(by)
        };
        shifted.unwrap_or(now)
    }

    /// Returns the APIs of the region.
    pub fn apis(&self) -> Result<&Apis, Error> {
        if let Some(apis) = self.apis.get() {
            return Ok(apis);
        }
        let region = self.region()?;
        let domain = domain(region);
        let named = self.variables.and_then(|get| get(credentials::EC2));
        let named = named.filter(|url| !url.is_empty());
        let of_variables = |name: &str| named.as_deref().filter(|_| name == "ec2");
        let api = |name: &str, host: &str| {
            let url = part(&self.place, name).or(of_variables(name));
            let url = url.map_or_else(
                || format!("https://{host}.{region}.{domain}"),
                str::to_owned,
            );
            let client = http::api(&url).map_err(|problem| Error::Url {
                url: http::shown(&url),
                problem: format!("{problem}; expected https://HOST[:PORT][/PATH]"),
            })?;
            Ok(Http::by(&url, client))
        };
        let apis = Apis {
            ec2: api("ec2", "ec2")?,
            elb: api("elb", "elasticloadbalancing")?,
            tagging: api("tagging", "tagging")?,
        };
        Ok(self.apis.get_or_init(|| apis))
    }

    /// Returns the answer of an API. If the request fails because of this machine's clock, it is repeated once with the API's time.
    /// If it fails because of its credentials, it is repeated once with new ones.
    pub fn call(&self, api: &Http, call: &ApiCall<'_>) -> Result<Vec<u8>, Error> {
        self.try_call(api, call).map_err(|failed| failed.error)
    }

    fn try_call(&self, api: &Http, call: &ApiCall<'_>) -> Result<Vec<u8>, Failed> {
        let (mut is_clock_set, mut is_renewed) = (false, false);
        loop {
            let signer = match self.variables {
                None => AwsSigner::Role(self.credentials()?),
                Some(_) => (self.signer()).map_err(|why| Error::Refused(why.to_string()))?,
            };
            let answer = self.send(api, call, &signer)?;
            if answer.status == 200 {
                return Ok(answer.content()?);
            }
            let (code, message) = parse_error(&answer.body);
            let is_refused = matches!(answer.status, 400 | 401 | 403);
            let skew = date(&answer).map(|date| seconds_between(self.now(), date));
            match skew {
                Some(skew) if is_refused && skew.abs() > MAX_SKEW && !is_clock_set => {
                    log::warn!(
                        "metadata: this machine's clock differs from that of AWS by {skew} s"
                    );
                    *lock(&self.skew) += skew;
                    is_clock_set = true;
                }
                _ if is_refused
                    && is_of_credentials(&code)
                    && !is_renewed
                    && matches!(signer, AwsSigner::Role(_)) =>
                {
                    *lock(&self.credentials) = None;
                    is_renewed = true;
                }
                _ if code.is_empty() => return Err(answer.error().into()),
                _ => {
                    let why = format!("status {}: {code}: {message}", answer.status);
                    let next = advice(&code, &signer.named_origin(), call.permission);
                    return Err(Failed {
                        is_later: answer.status >= 500 || is_throttling(&code),
                        code,
                        error: Error::Denied {
                            request: answer.request,
                            why,
                            next,
                        },
                    });
                }
            }
        }
    }

    fn send(
        &self,
        api: &Http,
        call: &ApiCall<'_>,
        signer: &AwsSigner,
    ) -> Result<PlainResponse, Error> {
        let mut fields = vec![("content-type", call.content_type)];
        fields.extend(call.target.map(|target| ("x-amz-target", target)));
        let body = call.body.as_bytes();
        let request = sigv4::SignedRequest {
            method: "POST",
            path: "/",
            fields: &fields,
            body,
        };
        let place = (call.service, self.region()?);
        let fields = signer.sign(&request, place, http::host(api.base()), self.now());
        let fields: Vec<_> = (fields.iter())
            .map(|(name, value)| (&**name, &**value))
            .collect();
        api.send("POST", "", &fields, Some(body), call.limit)
    }

    /// Sends `DescribeInstances` with these further parameters. Returns a description of the request, for errors about the answer,
    /// and the answer.
    pub fn describe_instances(
        &self,
        parameters: &[(&str, &str)],
        limit: u64,
    ) -> Result<(String, Vec<u8>), Failed> {
        let ec2 = &self.apis()?.ec2;
        let operation = [("Action", "DescribeInstances"), ("Version", "2016-11-15")];
        let parameters = form(&[&operation, parameters].concat());
        let call = ApiCall {
            limit,
            ..query("ec2", "ec2:DescribeInstances", &parameters)
        };
        let answer = self.try_call(ec2, &call)?;
        Ok((format!("POST {}", ec2.url("")), answer))
    }
}

/// Makes a call with parameters as a form.
pub fn query<'a>(service: &'static str, permission: &'static str, body: &'a str) -> ApiCall<'a> {
    ApiCall {
        service,
        permission,
        content_type: "application/x-www-form-urlencoded; charset=utf-8",
        target: None,
        body,
        limit: MAX_BODY,
    }
}

/// Returns the domain of a region's APIs ("AWS Regions and Endpoints").
pub fn domain(region: &str) -> &'static str {
    let domains = [
        ("cn-", "amazonaws.com.cn"),
        ("eusc-", "amazonaws.eu"),
        ("us-iso-", "c2s.ic.gov"),
        ("us-isob-", "sc2s.sgov.gov"),
    ];
    let found = domains
        .iter()
        .find(|(prefix, _)| region.starts_with(prefix));
    found.map_or("amazonaws.com", |(_, domain)| domain)
}

/// Returns the URL of an API in an argument of `--metadata`, `[URL][,NAME=URL]..`; that of the metadata service has no name.
fn part<'a>(place: &'a str, name: &str) -> Option<&'a str> {
    let named = |part: &'a str| {
        let known = part.split_once('=').filter(|(name, _)| APIS.contains(name));
        known.unwrap_or(("", part))
    };
    let mut parts = place.split(',').map(named);
    let (_, url) = parts.find(|(known, url)| *known == name && !url.is_empty())?;
    Some(url)
}

/// Returns when the service sent an answer.
fn date(answer: &PlainResponse) -> Option<SystemTime> {
    httpdate::parse_http_date(answer.field("Date")?).ok()
}

/// Returns by how many seconds `to` is later.
fn seconds_between(from: SystemTime, to: SystemTime) -> i64 {
    let seconds = |duration: Duration| i64::try_from(duration.as_secs()).unwrap_or(i64::MAX);
    match to.duration_since(from) {
        Ok(later) => seconds(later),
        Err(earlier) => -seconds(earlier.duration()),
    }
}

/// Checks that an answer is a name of letters, digits and `-._:=+@`, which can be a part of a path. Returns it.
pub fn name(request: &str, expected: &'static str, body: &[u8]) -> Result<String, Error> {
    let body = body.trim_ascii();
    match std::str::from_utf8(body) {
        Ok(text) if is_name(text) => Ok(text.to_owned()),
        _ => Err(Error::Nonsense {
            request: request.to_owned(),
            expected,
            got: format!("{:?}", excerpt(body)),
        }),
    }
}

/// Returns whether text is a name of letters, digits and `-._:=+@,`.
pub fn is_name(text: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-._:=+@,".contains(&byte);
    (1..=128).contains(&text.len()) && text.bytes().all(is_allowed) && !text.starts_with('.')
}

/// Parses the instance identity document; The error names `request`.
pub fn parse_identity(request: &str, body: &[u8]) -> Result<InstanceIdentity, Error> {
    let got = |why: String| nonsense(request, "an instance identity document", why);
    let identity: InstanceIdentity = serde_json::from_slice(body).map_err(|error| {
        let error = excerpt(error.to_string().as_bytes());
        got(format!("{:?} ({error})", excerpt(body)))
    })?;
    // credentials go to hosts whose names contain the region, so it is checked; the other values have the same form
    for (what, text) in [
        ("instanceId", &identity.instance_id),
        ("region", &identity.region),
        ("availabilityZone", &identity.availability_zone),
    ] {
        if !is_region(text) {
            let text = excerpt(text.as_bytes());
            return Err(got(format!("one with {what} {text:?}")));
        }
    }
    Ok(identity)
}

#[cfg(test)]
mod tests {
    use support::mutation::mutations;

    use super::*;

    /// The example of "Retrieve instance identity documents" in the EC2 User Guide.
    const IDENTITY: &str = r#"{
    "devpayProductCodes" : null,
    "marketplaceProductCodes" : [ "1abc2defghijklm3nopqrs4tu" ],
    "availabilityZone" : "us-west-2b",
    "privateIp" : "10.158.112.84",
    "version" : "2017-09-30",
    "instanceId" : "i-1234567890abcdef0",
    "billingProducts" : null,
    "instanceType" : "t2.micro",
    "accountId" : "123456789012",
    "imageId" : "ami-5fb8c835",
    "pendingTime" : "2016-11-19T16:32:11Z",
    "architecture" : "x86_64",
    "kernelId" : null,
    "ramdiskId" : null,
    "region" : "us-west-2"
}"#;
    #[test]
    fn the_identity_is_read() {
        let identity = parse_identity("GET x", IDENTITY.as_bytes()).unwrap();
        assert_eq!(identity.instance_id, "i-1234567890abcdef0");
        assert_eq!(identity.region, "us-west-2");
        assert_eq!(identity.private_ip.as_deref(), Some("10.158.112.84"));
        // credentials would go to that host
        for region in ["us-west-2.example/", "", "us west", "US"] {
            let lying = IDENTITY.replace("\"us-west-2\"", &format!("{region:?}"));
            assert!(
                parse_identity("GET x", lying.as_bytes()).is_err(),
                "{region}"
            );
        }
        for body in mutations(IDENTITY.as_bytes(), 5000) {
            if let Ok(identity) = parse_identity("GET x", &body) {
                assert!(is_name(&identity.region) && !identity.region.contains('.'));
            }
        }
    }

    #[test]
    fn a_place_names_the_service_and_some_apis() {
        for (place, service, ec2) in [
            ("", None, None),
            ("http://a", Some("http://a"), None),
            (",ec2=https://b", None, Some("https://b")),
            ("ec2=https://b", None, Some("https://b")),
            (
                "http://a,elb=https://c,ec2=https://b",
                Some("http://a"),
                Some("https://b"),
            ),
        ] {
            assert_eq!(
                (part(place, ""), part(place, "ec2")),
                (service, ec2),
                "{place}"
            );
        }
    }

    #[test]
    fn the_domain_is_that_of_the_partition() {
        for (region, expected) in [
            ("eu-central-1", "amazonaws.com"),
            ("us-gov-west-1", "amazonaws.com"),
            ("cn-north-1", "amazonaws.com.cn"),
            ("eusc-de-east-1", "amazonaws.eu"),
            ("us-isob-east-1", "sc2s.sgov.gov"),
            ("us-iso-east-1", "c2s.ic.gov"),
        ] {
            assert_eq!(domain(region), expected, "{region}");
        }
    }
}
