//! Amazon Web Services: the instance metadata service in its second version (IMDSv2), and the APIs of EC2, Elastic Load Balancing and
//! resource tags.
//!
//! | what | where |
//! |---|---|
//! | name, provider ID, address | the instance identity document |
//! | role, cluster, hash of the init secret | the tags `constellation-role`, `constellation-uid`, `constellation-init-secret-hash` of the instance, which its metadata must have (`InstanceMetadataTags`) |
//! | peers | EC2 `DescribeInstances`: the running instances with the cluster's `constellation-uid` |
//! | load balancer | the only one with the cluster's `constellation-uid` (`tag:GetResources`); its DNS name (`DescribeLoadBalancers`) |
//!
//! Requests to the APIs are signed with the credentials of the instance's role, or for a verifier as [`aws_caller`](super::aws_caller)
//! says.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use base::time;
use cloud::peers::no_tokens;
use roxmltree::{Document, Node, ParsingOptions};
use serde::Deserialize;
use serde_json::json;
use zeroize::Zeroizing;

use super::aws_caller::{self, Signer, Unsigned, Variables, is_region};
use super::https::api as api_at;
use super::place::Place;
use super::{pages, sigv4};
use cloud::http::{AWS, Answer, Http, MAX_BODY, excerpt};
use http::form;
use machines::{Alias, Error, Instance, Metadata, Range, Role, bcrypt_hash};

/// The names by which `--metadata` replaces the address of an API.
const APIS: [&str; 3] = ["ec2", "elb", "tagging"];
/// The lifetime of a token of the metadata service in seconds: the longest.
const TOKEN_LIFETIME: u64 = 21_600;
/// How long before their end a token and credentials are renewed. New credentials are there at least five minutes before the end of the
/// old ones ("Retrieve security credentials from instance metadata").
const EARLY: Duration = Duration::from_secs(300);
/// Maximum size in bytes of a page of 1000 instances.
const MAX_PAGE: u64 = 24 << 20;
/// Maximum number of nodes of a page's XML: a described instance has about 250.
const MAX_NODES: u32 = 2_000_000;
/// Maximum length of what is an entry of an error in XML or JSON.
const MAX_SHOWN: usize = 300;
/// Deviation of the clock that a request is repeated for. The APIs accept five minutes.
const MAX_SKEW: i64 = 120;

/// A client of the services. A call makes one request for each page, and those for a new token and new credentials.
pub struct Client {
    imds: Http,
    place: Place,
    token: Mutex<Option<(Zeroizing<String>, Instant)>>,
    credentials: Mutex<Option<Arc<Credentials>>>,
    identity: OnceLock<Identity>,
    apis: OnceLock<Apis>,
    /// The variables that go before the instance's role and region; a node has none.
    variables: Option<Variables>,
    region: OnceLock<String>,
    /// How many seconds the clock of the APIs is ahead of this machine's.
    skew: Mutex<i64>,
}

struct Apis {
    ec2: Http,
    elb: Http,
    tagging: Http,
}

/// What the instance identity document says.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Identity {
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

/// The credentials of the instance's role.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct Credentials {
    access_key_id: String,
    secret_access_key: Zeroizing<String>,
    token: Zeroizing<String>,
    /// When they end, by the clock of AWS.
    expiration: String,
    /// The name of the role.
    #[serde(skip)]
    role: String,
}

/// Why a call failed.
pub struct Failed {
    /// The API's code; empty without one.
    pub code: String,
    /// Whether the same request may soon succeed.
    pub is_later: bool,
    /// The error, which names the code, too.
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
struct Call<'a> {
    service: &'static str,
    /// What the caller must be permitted.
    permission: &'static str,
    content_type: &'static str,
    target: Option<&'static str>,
    body: &'a str,
    /// Maximum size of the answer in bytes.
    limit: u64,
}

impl Client {
    /// Makes a client of the services at this place: `[URL][,ec2=URL][,elb=URL][,tagging=URL]`. Sends no request.
    pub fn new(place: Option<&str>) -> Result<Client, Error> {
        let place = Place::parse(place, AWS, &APIS, &[])?;
        Ok(Client {
            imds: Http::new(&place.service),
            place,
            token: Mutex::default(),
            credentials: Mutex::default(),
            identity: OnceLock::new(),
            apis: OnceLock::new(),
            variables: None,
            region: OnceLock::new(),
            skew: Mutex::new(0),
        })
    }

    /// Makes a client for who is not a node: variables may have the credentials, the region, and the addresses that `place` does not
    /// have. Sends no request.
    pub fn of_caller(place: Option<&str>, variables: Variables) -> Result<Client, Error> {
        let imds = variables(aws_caller::IMDS).filter(|url| !url.is_empty());
        let place = place.or(imds.as_deref());
        Ok(Client {
            variables: Some(variables),
            ..Client::new(place)?
        })
    }

    /// Returns who signs now.
    pub fn signer(&self) -> Result<Signer, Unsigned> {
        let absent = |error: Error| Unsigned::Absent(error.to_string());
        match self.variables {
            None => self.credentials().map(Signer::Role).map_err(absent),
            Some(variables) => Signer::find(variables, || self.credentials()),
        }
    }

    /// Returns the region whose APIs are asked.
    pub fn region(&self) -> Result<&str, Error> {
        if let Some(region) = self.region.get() {
            return Ok(region);
        }
        let named = self.variables.map_or(Ok(None), aws_caller::region);
        let region = match named.map_err(Error::Refused)? {
            Some(region) => region,
            None => self.identity()?.region.clone(),
        };
        Ok(self.region.get_or_init(|| region))
    }

    /// Returns what the metadata service has at a path below `/latest`. A token that is no longer valid is renewed once.
    fn imds(&self, path: &str) -> Result<Vec<u8>, Error> {
        let path = format!("latest/{path}");
        let get = |token: &str| {
            let fields = [("X-aws-ec2-metadata-token", token)];
            self.imds.get(&path, &fields, MAX_BODY)
        };
        match get(&self.token()?) {
            Err(Error::Status { status: 401, .. }) => {
                *locked(&self.token) = None;
                get(&self.token()?)
            }
            other => other,
        }
    }

    /// Returns a token of the metadata service.
    fn token(&self) -> Result<Zeroizing<String>, Error> {
        let mut token = locked(&self.token);
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

    /// Returns what this instance is. It never changes.
    fn identity(&self) -> Result<&Identity, Error> {
        if let Some(identity) = self.identity.get() {
            return Ok(identity);
        }
        const PATH: &str = "dynamic/instance-identity/document";
        let document = self.imds(PATH)?;
        let identity = parse_identity(&self.imds_request(PATH), &document)?;
        Ok(self.identity.get_or_init(|| identity))
    }

    /// Returns the value of a tag of this instance.
    fn tag(&self, name: &str) -> Result<Vec<u8>, Error> {
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

    /// Returns the ID of the cluster by which its resources are tagged.
    fn uid(&self) -> Result<String, Error> {
        const NAME: &str = "constellation-uid";
        let request = self.imds_request(&format!("meta-data/tags/instance/{NAME}"));
        name(&request, "the cluster's ID", &self.tag(NAME)?)
    }

    fn imds_request(&self, path: &str) -> String {
        format!("GET {}", self.imds.url(&format!("latest/{path}")))
    }

    /// Returns credentials of the instance's role that are valid for some more minutes.
    pub fn credentials(&self) -> Result<Arc<Credentials>, Error> {
        const PATH: &str = "meta-data/iam/security-credentials/";
        let mut known = locked(&self.credentials);
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
        let new = parse_credentials(&self.imds_request(&path), &answer)?;
        let new = Arc::new(Credentials { role, ..new });
        *known = Some(new.clone());
        Ok(new)
    }

    /// Returns the time by the clock of the APIs.
    fn now(&self) -> SystemTime {
        let skew = *locked(&self.skew);
        let by = Duration::from_secs(skew.unsigned_abs());
        let now = SystemTime::now();
        let shifted = match skew < 0 {
            true => now.checked_sub(by),
            false => now.checked_add(by),
        };
        shifted.unwrap_or(now)
    }

    fn apis(&self) -> Result<&Apis, Error> {
        if let Some(apis) = self.apis.get() {
            return Ok(apis);
        }
        let region = self.region()?;
        let domain = domain(region);
        let named = self.variables.and_then(|get| get(aws_caller::EC2));
        let named = named.filter(|url| !url.is_empty());
        let of_variables = |name: &str| named.as_deref().filter(|_| name == "ec2");
        let api = |name: &str, host: &str| match self.place.api(name).or(of_variables(name)) {
            Some(url) => api_at(url),
            None => api_at(&format!("https://{host}.{region}.{domain}")),
        };
        let apis = Apis {
            ec2: api("ec2", "ec2")?,
            elb: api("elb", "elasticloadbalancing")?,
            tagging: api("tagging", "tagging")?,
        };
        Ok(self.apis.get_or_init(|| apis))
    }

    /// Returns the answer of an API. A request that fails because of this machine's clock is repeated with the API's clock, and one that
    /// fails because of its credentials with new ones, each once.
    fn call(&self, api: &Http, call: &Call<'_>) -> Result<Vec<u8>, Error> {
        self.try_call(api, call).map_err(|failed| failed.error)
    }

    fn try_call(&self, api: &Http, call: &Call<'_>) -> Result<Vec<u8>, Failed> {
        let (mut is_clock_set, mut is_renewed) = (false, false);
        loop {
            let signer = match self.variables {
                None => Signer::Role(self.credentials()?),
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
                    *locked(&self.skew) += skew;
                    is_clock_set = true;
                }
                _ if is_refused
                    && is_of_credentials(&code)
                    && !is_renewed
                    && matches!(signer, Signer::Role(_)) =>
                {
                    *locked(&self.credentials) = None;
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

    fn send(&self, api: &Http, call: &Call<'_>, signer: &Signer) -> Result<Answer, Error> {
        let date = sigv4::date(self.now());
        let mut fields = vec![
            ("content-type", call.content_type),
            ("host", http::host(api.base())),
            ("x-amz-date", &*date),
        ];
        fields.extend(signer.token().map(|token| ("x-amz-security-token", token)));
        fields.extend(call.target.map(|target| ("x-amz-target", target)));
        let request = sigv4::Request {
            method: "POST",
            path: "/",
            fields: &fields,
            body: call.body.as_bytes(),
        };
        let region = self.region()?;
        let authorization =
            sigv4::authorization(&signer.key(), region, call.service, &date, &request);
        fields.retain(|(name, _)| *name != "host");
        fields.push(("authorization", &authorization));
        api.send("POST", "", &fields, Some(call.body.as_bytes()), call.limit)
    }

    /// Returns all of the cluster's instances, which `parse` reads page by page.
    fn all<T>(
        &self,
        parse: impl Fn(&str, &[u8]) -> Result<(Vec<T>, Option<String>), Error>,
    ) -> Result<Vec<T>, Error> {
        let uid = self.uid()?;
        pages::all(
            |mark| {
                let (request, page) = self.page(&uid, mark)?;
                parse(&request, &page)
            },
            |got| Error::Nonsense {
                request: "EC2 DescribeInstances".into(),
                expected: "the instances of the cluster",
                got,
            },
        )
    }

    /// Returns a page of the cluster's instances, behind its request.
    fn page(&self, uid: &str, mark: Option<&str>) -> Result<(String, Vec<u8>), Error> {
        let mut parameters = vec![
            ("Filter.1.Name", "tag:constellation-uid"),
            ("Filter.1.Value.1", uid),
            ("Filter.2.Name", "instance-state-name"),
            ("Filter.2.Value.1", "running"),
            ("MaxResults", "1000"),
        ];
        parameters.extend(mark.map(|mark| ("NextToken", mark)));
        self.describe_instances(&parameters, MAX_PAGE)
            .map_err(|failed| failed.error)
    }

    /// Returns the answer to `DescribeInstances` with these further parameters, behind the request, which an error about it names.
    pub fn describe_instances(
        &self,
        parameters: &[(&str, &str)],
        limit: u64,
    ) -> Result<(String, Vec<u8>), Failed> {
        let ec2 = &self.apis()?.ec2;
        let operation = [("Action", "DescribeInstances"), ("Version", "2016-11-15")];
        let parameters = form(&[&operation, parameters].concat());
        let call = Call {
            limit,
            ..query("ec2", "ec2:DescribeInstances", &parameters)
        };
        let answer = self.try_call(ec2, &call)?;
        Ok((format!("POST {}", ec2.url("")), answer))
    }
}

impl Metadata for Client {
    fn own_instance(&self) -> Result<Instance, Error> {
        let identity = self.identity()?;
        let role = self.tag("constellation-role")?;
        Ok(Instance {
            name: identity.instance_id.clone(),
            provider_id: provider_id(&identity.availability_zone, &identity.instance_id),
            role: Role::parse(String::from_utf8_lossy(&role).trim()),
            vpc_ip: match &identity.private_ip {
                Some(ip) => ip.parse().ok(),
                None => first_ip(&self.imds("meta-data/ipv6")?),
            },
        })
    }

    fn peers(&self) -> Result<Vec<Instance>, Error> {
        self.all(parse_instances)
    }

    fn aliases(&self) -> Result<Vec<Alias>, Error> {
        self.all(parse_aliases)
    }

    fn load_balancer_endpoint(&self) -> Result<String, Error> {
        let uid = self.uid()?;
        let apis = self.apis()?;
        let wanted = json!({
            "ResourceTypeFilters": ["elasticloadbalancing:loadbalancer"],
            "TagFilters": [{"Key": "constellation-uid", "Values": [uid]}],
        })
        .to_string();
        let call = Call {
            content_type: "application/x-amz-json-1.1",
            target: Some("ResourceGroupsTaggingAPI_20170126.GetResources"),
            ..query("tagging", "tag:GetResources", &wanted)
        };
        let request = format!("POST {}", apis.tagging.url(""));
        let arn = parse_arn(&request, &self.call(&apis.tagging, &call)?)?;
        let parameters = form(&[
            ("Action", "DescribeLoadBalancers"),
            ("Version", "2015-12-01"),
            ("LoadBalancerArns.member.1", &arn),
        ]);
        let permission = "elasticloadbalancing:DescribeLoadBalancers";
        let call = query("elasticloadbalancing", permission, &parameters);
        let request = format!("POST {}", apis.elb.url(""));
        parse_dns_name(&request, &self.call(&apis.elb, &call)?)
    }

    fn init_secret_hash(&self) -> Result<String, Error> {
        const NAME: &str = "constellation-init-secret-hash";
        let request = self.imds_request(&format!("meta-data/tags/instance/{NAME}"));
        bcrypt_hash(&request, &self.tag(NAME)?)
    }

    fn ranges(&self) -> Result<Vec<Range>, Error> {
        let mac = self.imds("meta-data/mac")?;
        let mac = name(&self.imds_request("meta-data/mac"), "an address", &mac)?;
        let mut ranges = vec![];
        for kind in ["vpc-ipv4-cidr-blocks", "vpc-ipv6-cidr-blocks"] {
            let path = format!("meta-data/network/interfaces/macs/{mac}/{kind}");
            match self.imds(&path) {
                Ok(list) => {
                    let list = String::from_utf8_lossy(&list);
                    ranges.extend(list.lines().filter_map(|line| Range::parse(line.trim())));
                }
                // a network without addresses of this kind
                Err(Error::Status { status: 404, .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(ranges)
    }
}

impl Credentials {
    /// Returns the key that signs.
    pub fn key(&self) -> sigv4::Key<'_> {
        sigv4::Key {
            id: &self.access_key_id,
            secret: &self.secret_access_key,
        }
    }

    /// Returns the value of the field `x-amz-security-token`.
    pub fn token(&self) -> &str {
        &self.token
    }

    /// Returns the name of the role.
    pub fn role(&self) -> &str {
        &self.role
    }

    /// Returns whether they are still valid for some time.
    fn last(&self, now: SystemTime) -> bool {
        time::parse(&self.expiration).is_some_and(|end| now + EARLY < end)
    }
}

/// Makes a call with parameters as a form.
fn query<'a>(service: &'static str, permission: &'static str, body: &'a str) -> Call<'a> {
    Call {
        service,
        permission,
        content_type: "application/x-www-form-urlencoded; charset=utf-8",
        target: None,
        body,
        limit: MAX_BODY,
    }
}

fn locked<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the domain of the APIs in a region ("AWS Regions and Endpoints").
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

fn provider_id(zone: &str, instance: &str) -> String {
    format!("aws:///{zone}/{instance}")
}

/// Returns whether an error's code says that the credentials are not, or no longer, valid.
pub fn is_of_credentials(code: &str) -> bool {
    matches!(
        code,
        "AuthFailure"
            | "ExpiredToken"
            | "ExpiredTokenException"
            | "InvalidClientTokenId"
            | "RequestExpired"
            | "UnrecognizedClientException"
    )
}

/// Returns whether an error's code says that there were too many requests ("Error codes for the Amazon EC2 API").
fn is_throttling(code: &str) -> bool {
    matches!(
        code,
        "RequestLimitExceeded" | "Throttling" | "ThrottlingException"
    )
}

/// Says what an operator can do about an error.
fn advice(code: &str, origin: &str, permission: &str) -> String {
    match code {
        "UnauthorizedOperation" | "AccessDenied" | "AccessDeniedException" => {
            format!("{origin} needs the permission {permission} (docs/clouds.md)")
        }
        _ if is_throttling(code) => "it is asked again later".into(),
        "OptInRequired" | "InvalidRegion" => "the account does not use this region".into(),
        _ => "the error is of the API".into(),
    }
}

/// Returns when the service sent an answer.
fn date(answer: &Answer) -> Option<SystemTime> {
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

/// Returns the first line if it is an address.
fn first_ip(body: &[u8]) -> Option<std::net::IpAddr> {
    let text = String::from_utf8_lossy(body);
    text.lines().next()?.trim().parse().ok()
}

/// Returns an answer that is a name of letters, digits and `-._:=+@`, and that thus may be a part of a path.
fn name(request: &str, expected: &'static str, body: &[u8]) -> Result<String, Error> {
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

/// Parses the instance identity document; `request` is for the error.
pub fn parse_identity(request: &str, body: &[u8]) -> Result<Identity, Error> {
    let got = |why: String| Error::Nonsense {
        request: request.to_owned(),
        expected: "an instance identity document",
        got: why,
    };
    let identity: Identity = serde_json::from_slice(body).map_err(|error| {
        let error = excerpt(error.to_string().as_bytes());
        got(format!("{:?} ({error})", excerpt(body)))
    })?;
    // the region is a part of the names of hosts, to which credentials go; the others have the same form
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

/// Parses the credentials of a role; the error does not repeat them.
pub fn parse_credentials(request: &str, body: &[u8]) -> Result<Credentials, Error> {
    let is_visible = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_graphic());
    match serde_json::from_slice::<Credentials>(body) {
        Ok(credentials)
            if is_visible(&credentials.access_key_id)
                && is_visible(&credentials.token)
                && time::parse(&credentials.expiration).is_some() =>
        {
            Ok(credentials)
        }
        _ => Err(Error::Nonsense {
            request: request.to_owned(),
            expected: "credentials of the instance's role",
            got: format!("{} bytes that are none", body.len()),
        }),
    }
}

/// Parses a page of `DescribeInstances`: the running instances, and the mark of the next page. An instance that the old system would
/// not list, because it has no role or no address, is logged and omitted.
pub fn parse_instances(
    request: &str,
    body: &[u8],
) -> Result<(Vec<Instance>, Option<String>), Error> {
    parse_page(request, body, instance)
}

/// Parses a page of `DescribeInstances`: names and addresses of the running instances, and the mark of the next page. They are those
/// that AWS's controller gives to a Node: of all attached interfaces, the public address, and the DNS names.
pub fn parse_aliases(request: &str, body: &[u8]) -> Result<(Vec<Alias>, Option<String>), Error> {
    parse_page(request, body, alias)
}

fn parse_page<T>(
    request: &str,
    body: &[u8],
    parse: impl Fn(Node<'_, '_>) -> Result<Option<T>, String>,
) -> Result<(Vec<T>, Option<String>), Error> {
    let nonsense = |why: String| Error::Nonsense {
        request: request.to_owned(),
        expected: "a page of instances",
        got: why,
    };
    let document = document(body).map_err(nonsense)?;
    let root = document.root_element();
    if !root.has_tag_name("DescribeInstancesResponse") {
        let name = excerpt(root.tag_name().name().as_bytes());
        return Err(nonsense(format!("a {name:?}")));
    }
    let instances = child(root, "reservationSet")
        .into_iter()
        .flat_map(|set| children(set, "item"))
        .filter_map(|reservation| child(reservation, "instancesSet"))
        .flat_map(|set| children(set, "item"));
    let described = instances.filter_map(|item| match parse(item) {
        Ok(parsed) => parsed,
        Err(why) => {
            log::warn!("metadata: {request}: ignoring {why}");
            None
        }
    });
    let next = child(root, "nextToken").and_then(|next| next.text());
    Ok((described.collect(), next.map(str::to_owned)))
}

/// Returns a described instance; `None` if it is not running. The error says what is wrong.
fn instance(item: Node<'_, '_>) -> Result<Option<Instance>, String> {
    let text = |path: &[&str]| text_at(item, path);
    if text(&["instanceState", "name"]) != "running" {
        return Ok(None);
    }
    let (id, zone) = (
        text(&["instanceId"]),
        text(&["placement", "availabilityZone"]),
    );
    if !is_name(id) || !is_name(zone) {
        let (id, zone) = (excerpt(id.as_bytes()), excerpt(zone.as_bytes()));
        return Err(format!("an instance with ID {id:?} in the zone {zone:?}"));
    }
    let role = child(item, "tagSet")
        .into_iter()
        .flat_map(|tags| children(tags, "item"))
        .find(|tag| child(*tag, "key").and_then(|key| key.text()) == Some("constellation-role"))
        .and_then(|tag| child(tag, "value")?.text())
        .ok_or_else(|| format!("{id}: it has no tag constellation-role"))?;
    let address = match (text(&["privateIpAddress"]), text(&["ipv6Address"])) {
        ("", ipv6) => ipv6,
        (ipv4, _) => ipv4,
    };
    let address = address
        .parse()
        .map_err(|_| format!("{id}: its address is {:?}", excerpt(address.as_bytes())))?;
    Ok(Some(Instance {
        name: id.to_owned(),
        provider_id: provider_id(zone, id),
        role: Role::parse(role),
        vpc_ip: Some(address),
    }))
}

/// Returns names and addresses of a described instance; `None` if it is not running.
fn alias(item: Node<'_, '_>) -> Result<Option<Alias>, String> {
    if text_at(item, &["instanceState", "name"]) != "running" {
        return Ok(None);
    }
    let interfaces = child(item, "networkInterfaceSet").into_iter();
    let addresses = interfaces
        .flat_map(|set| children(set, "item"))
        .filter(|interface| text_at(*interface, &["status"]) == "in-use")
        .flat_map(|interface| {
            [
                ("privateIpAddressesSet", "privateIpAddress"),
                ("ipv6AddressesSet", "ipv6Address"),
            ]
            .into_iter()
            .filter_map(move |(set, name)| Some((child(interface, set)?, name)))
        })
        .flat_map(|(set, name)| children(set, "item").map(move |item| text_at(item, &[name])))
        .chain(["ipAddress", "ipv6Address"].map(|name| text_at(item, &[name])));
    let names = ["privateDnsName", "dnsName"].map(|name| text_at(item, &[name]));
    Ok(Some(Alias {
        machine: text_at(item, &["instanceId"]).to_owned(),
        addresses: addresses.filter_map(|text| text.parse().ok()).collect(),
        names: (names.iter())
            .filter(|name| !name.is_empty())
            .map(|name| (*name).to_owned())
            .collect(),
    }))
}

/// Returns the text of the element at a path; empty without one.
fn text_at<'a>(item: Node<'a, '_>, path: &[&str]) -> &'a str {
    let found = path.iter().try_fold(item, |node, name| child(node, name));
    found.and_then(|node| node.text()).unwrap_or_default()
}

/// Parses the answer of `GetResources` to the question for the load balancer: its ARN.
pub fn parse_arn(request: &str, body: &[u8]) -> Result<String, Error> {
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Resources {
        resource_tag_mapping_list: Vec<Resource>,
    }
    #[derive(Deserialize)]
    struct Resource {
        #[serde(rename = "ResourceARN")]
        arn: String,
    }
    let nonsense = |got: String| Error::Nonsense {
        request: request.to_owned(),
        expected: "one load balancer with the cluster's tag constellation-uid",
        got,
    };
    let resources: Resources = serde_json::from_slice(body).map_err(|error| {
        let error = excerpt(error.to_string().as_bytes());
        nonsense(format!("{:?} ({error})", excerpt(body)))
    })?;
    match resources.resource_tag_mapping_list.as_slice() {
        [Resource { arn }] if arn.starts_with("arn:") && arn.len() <= 2048 => Ok(arn.clone()),
        [Resource { arn }] => Err(nonsense(format!("{:?}", excerpt(arn.as_bytes())))),
        other => Err(nonsense(format!("{}", other.len()))),
    }
}

/// Parses the answer of `DescribeLoadBalancers` to the question for one: its DNS name.
pub fn parse_dns_name(request: &str, body: &[u8]) -> Result<String, Error> {
    let nonsense = |got: String| Error::Nonsense {
        request: request.to_owned(),
        expected: "a load balancer with a DNS name",
        got,
    };
    let document = document(body).map_err(nonsense)?;
    let path = ["DescribeLoadBalancersResult", "LoadBalancers"];
    let set = path
        .iter()
        .try_fold(document.root_element(), |node, name| child(node, name));
    let mut names = set
        .into_iter()
        .flat_map(|set| children(set, "member"))
        .map(|member| child(member, "DNSName").and_then(|name| name.text()));
    match (names.next(), names.next()) {
        (Some(Some(name)), None) if name.len() <= 253 => Ok(name.to_owned()),
        _ => Err(nonsense(format!("{:?}", excerpt(body)))),
    }
}

/// Returns code and message of an error of an API, in XML or JSON; empty ones if it is none.
pub fn parse_error(body: &[u8]) -> (String, String) {
    #[derive(Deserialize)]
    struct OfJson {
        #[serde(rename = "__type")]
        code: String,
        #[serde(alias = "Message", default)]
        message: String,
    }
    let short = |text: &str| text.chars().take(MAX_SHOWN).collect::<String>();
    if let Ok(error) = serde_json::from_slice::<OfJson>(body) {
        let code = error.code.rsplit('#').next().unwrap_or_default();
        return (short(code), short(&error.message));
    }
    let Ok(document) = document(body) else {
        return Default::default();
    };
    let error = document
        .root()
        .descendants()
        .find(|node| node.has_tag_name("Error"));
    let text = |name| {
        let text = error.and_then(|error| child(error, name)?.text());
        short(text.unwrap_or_default())
    };
    (text("Code"), text("Message"))
}

/// Parses XML. The error is a clause.
pub fn document(body: &[u8]) -> Result<Document<'_>, String> {
    let fault = |error: String| format!("{:?} ({})", excerpt(body), excerpt(error.as_bytes()));
    let text = std::str::from_utf8(body).map_err(|error| fault(error.to_string()))?;
    let options = ParsingOptions {
        allow_dtd: false,
        nodes_limit: MAX_NODES,
        ..ParsingOptions::default()
    };
    Document::parse_with_options(text, options).map_err(|error| fault(error.to_string()))
}

/// Returns the first element in a node with this name.
pub fn child<'a, 'b>(node: Node<'a, 'b>, name: &str) -> Option<Node<'a, 'b>> {
    node.children().find(|child| child.has_tag_name(name))
}

/// Returns the elements in a node with this name.
pub fn children<'a, 'b>(node: Node<'a, 'b>, name: &str) -> impl Iterator<Item = Node<'a, 'b>> {
    node.children()
        .filter(move |child| child.has_tag_name(name))
}

#[cfg(test)]
mod tests {
    use std::fmt::Write;

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
    /// The example of "Retrieve security credentials from instance metadata" there.
    const CREDENTIALS: &str = r#"{
  "Code" : "Success",
  "LastUpdated" : "2012-04-26T16:39:16Z",
  "Type" : "AWS-HMAC",
  "AccessKeyId" : "ASIAIOSFODNN7EXAMPLE",
  "SecretAccessKey" : "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
  "Token" : "token",
  "Expiration" : "2017-05-17T15:09:54Z"
}"#;

    /// Returns an instance in the form of the API reference (DescribeInstances), with the elements that are read and some that are not.
    fn item(id: &str, state: &str, address: &str, tags: &str) -> String {
        format!(
            "<item><reservationId>r-1234567890abcdef0</reservationId><ownerId>123456789012</ownerId><groupSet/><instancesSet><item>\
             <instanceId>{id}</instanceId><imageId>ami-bff32ccc</imageId>\
             <instanceState><code>16</code><name>{state}</name></instanceState>{address}<placement>\
             <availabilityZone>eu-west-1c</availabilityZone><groupName/><tenancy>default</tenancy></placement>\
             <networkInterfaceSet><item><privateIpAddress>10.9.9.9</privateIpAddress></item></networkInterfaceSet>\
             <tagSet>{tags}</tagSet></item></instancesSet></item>"
        )
    }

    fn page(items: &str, next: &str) -> String {
        format!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<DescribeInstancesResponse \
             xmlns=\"http://ec2.amazonaws.com/doc/2016-11-15/\"><requestId>8f7724cf-496f-496e-8fe3-example</requestId>\
             <reservationSet>{items}</reservationSet>{next}</DescribeInstancesResponse>"
        )
    }

    fn tag(key: &str, value: &str) -> String {
        format!("<item><key>{key}</key><value>{value}</value></item>")
    }

    fn ipv4(address: &str) -> String {
        format!("<privateIpAddress>{address}</privateIpAddress>")
    }

    fn parsed(xml: &str) -> (Vec<Instance>, Option<String>) {
        parse_instances("POST x", xml.as_bytes()).unwrap()
    }

    #[test]
    fn a_page_of_instances_is_read() {
        let role = |role| tag("Name", "x") + &tag("constellation-role", role);
        let items = [
            item("i-01", "running", &ipv4("10.0.0.1"), &role("control-plane")),
            item(
                "i-02",
                "running",
                "<ipv6Address>2001:db8::2</ipv6Address>",
                &role("worker"),
            ),
            item("i-03", "shutting-down", &ipv4("10.0.0.3"), &role("worker")),
            item("i-04", "terminated", "", &role("worker")),
            // omitted, with a warning
            item("i-05", "running", &ipv4("10.0.0.5"), ""),
            item("i-06", "running", &ipv4("here"), &role("worker")),
            item("../07", "running", &ipv4("10.0.0.7"), &role("worker")),
        ];
        let (machines, next) = parsed(&page(&items.concat(), "<nextToken>a+b=</nextToken>"));
        assert_eq!(next.as_deref(), Some("a+b="));
        assert_eq!(machines.len(), 2);
        assert_eq!(
            machines[0],
            Instance {
                name: "i-01".into(),
                provider_id: "aws:///eu-west-1c/i-01".into(),
                role: Role::ControlPlane,
                vpc_ip: Some("10.0.0.1".parse().unwrap()),
            }
        );
        assert_eq!(machines[1].vpc_ip, Some("2001:db8::2".parse().unwrap()));
        assert_eq!(parsed(&page("", "")), (vec![], None));
    }

    #[test]
    fn other_xml_is_no_page() {
        let whole = page("", "");
        for (body, why) in [
            ("", "root"),
            ("{}", "{}"),
            ("<html></html>", "html"),
            (&whole[..whole.len() - 1], ""),
            ("<!DOCTYPE a [<!ENTITY b \"c\">]><a>&b;</a>", "DTD"),
            (&"<a>".repeat(20_000), ""),
        ] {
            let error = parse_instances("POST x", body.as_bytes()).unwrap_err();
            let error = error.to_string();
            assert!(error.contains("a page of instances"), "{error}");
            assert!(error.contains(why) && error.len() < 1000, "{error}");
        }
    }

    #[test]
    fn a_page_with_an_element_in_itself_200_000_times_ends() {
        let deep = "<item>".repeat(200_000) + &"</item>".repeat(200_000);
        let _ = parse_instances("POST x", page(&deep, "").as_bytes());
    }

    #[test]
    fn identity_and_credentials_are_read() {
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
        let credentials = parse_credentials("GET x", CREDENTIALS.as_bytes()).unwrap();
        let end = time::parse("2017-05-17T15:09:54Z").unwrap();
        assert!(credentials.last(end - EARLY - Duration::from_secs(1)));
        assert!(!credentials.last(end - EARLY));
        let bad = CREDENTIALS.replace("\"token\"", "\"to\\nken\"");
        let error = parse_credentials("GET x", bad.as_bytes()).err().unwrap();
        assert!(!error.to_string().contains("wJalr"), "{error}");
    }

    #[test]
    fn the_load_balancer_is_the_only_one() {
        let one = r#"{"ResourceARN":"arn:aws:elasticloadbalancing:x","Tags":[]}"#;
        let list =
            |items: &str| format!(r#"{{"PaginationToken":"","ResourceTagMappingList":[{items}]}}"#);
        let found = parse_arn("POST x", list(one).as_bytes()).unwrap();
        assert_eq!(found, "arn:aws:elasticloadbalancing:x");
        for (items, got) in [
            (String::new(), "got 0"),
            (format!("{one},{one}"), "got 2"),
            (r#"{"ResourceARN":"x"}"#.into(), "got \"x\""),
        ] {
            let error = parse_arn("POST x", list(&items).as_bytes()).unwrap_err();
            assert!(error.to_string().ends_with(got), "{error}");
        }
        let members = |members: &str| {
            format!(
                "<DescribeLoadBalancersResponse xmlns=\"http://elasticloadbalancing.amazonaws.com/doc/2015-12-01/\">\
                 <DescribeLoadBalancersResult><LoadBalancers>{members}</LoadBalancers></DescribeLoadBalancersResult>\
                 </DescribeLoadBalancersResponse>"
            )
        };
        let one = "<member><Scheme>internal</Scheme><DNSName>a-1.elb.example</DNSName></member>";
        let name = parse_dns_name("POST x", members(one).as_bytes()).unwrap();
        assert_eq!(name, "a-1.elb.example");
        for other in [String::new(), one.repeat(2), "<member/>".into()] {
            assert!(parse_dns_name("POST x", members(&other).as_bytes()).is_err());
        }
    }

    #[test]
    fn errors_of_all_apis_are_read() {
        for (body, code, message) in [
            (
                "<Response><Errors><Error><Code>RequestLimitExceeded</Code><Message>Request limit exceeded.</Message></Error></Errors>\
                 <RequestID>x</RequestID></Response>",
                "RequestLimitExceeded",
                "Request limit exceeded.",
            ),
            (
                "<ErrorResponse xmlns=\"http://elasticloadbalancing.amazonaws.com/doc/2015-12-01/\"><Error><Type>Sender</Type>\
                 <Code>LoadBalancerNotFound</Code><Message>m</Message></Error></ErrorResponse>",
                "LoadBalancerNotFound",
                "m",
            ),
            (
                r#"{"__type":"com.amazon.coral#ThrottlingException","Message":"Rate exceeded"}"#,
                "ThrottlingException",
                "Rate exceeded",
            ),
            ("<html>", "", ""),
            ("", "", ""),
        ] {
            let expected = (code.to_owned(), message.to_owned());
            assert_eq!(parse_error(body.as_bytes()), expected, "{body}");
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

    #[test]
    fn mutated_answers_are_read_or_refused() {
        let mut items = String::new();
        for number in 0..3 {
            let tags = tag("constellation-role", "worker");
            let address = ipv4(&format!("10.0.0.{number}"));
            write!(
                items,
                "{}",
                item(&format!("i-0{number}"), "running", &address, &tags)
            )
            .unwrap();
        }
        let (mut good, mut bad) = (0, 0);
        for body in mutations(page(&items, "<nextToken>x</nextToken>").as_bytes(), 10_000) {
            match parse_instances("POST x", &body) {
                Ok((machines, _)) => {
                    good += 1;
                    assert!(machines.iter().all(|machine| is_name(&machine.name)));
                }
                Err(error) => {
                    bad += 1;
                    assert!(error.to_string().len() < 4096);
                }
            }
        }
        assert!(good > 100 && bad > 100, "{good} good, {bad} bad");
        for body in mutations(IDENTITY.as_bytes(), 5000) {
            if let Ok(identity) = parse_identity("GET x", &body) {
                assert!(is_name(&identity.region) && !identity.region.contains('.'));
            }
        }
        for body in mutations(CREDENTIALS.as_bytes(), 5000) {
            let _ = parse_credentials("GET x", &body);
        }
        let arn = br#"{"ResourceTagMappingList":[{"ResourceARN":"arn:aws:x"}]}"#;
        for body in mutations(arn, 5000) {
            let _ = parse_arn("POST x", &body);
            let _ = parse_error(&body);
        }
    }
}
