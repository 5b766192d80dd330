//! The argument of `--metadata`, the addresses of a cloud's services: `[URL][,NAME=URL]..`. The first URL is the metadata
//! service's. A name and a URL replace the usual address of an API, for private endpoints and sovereign clouds. Some clouds also
//! have names whose values are no URLs.

use base::machines::Error;
use cloud::plain::Url;

/// The services' addresses.
#[derive(Debug)]
pub struct Endpoints {
    /// The URL of the metadata service.
    pub service: String,
    named: Vec<(&'static str, String)>,
}

impl Endpoints {
    /// Parses the argument. `service` is the usual URL of the metadata service; `apis` has the names of the APIs, and `values` the
    /// names of other values, which are letters, digits and hyphens.
    pub fn parse(
        text: Option<&str>,
        service: &str,
        apis: &[&'static str],
        values: &[&'static str],
    ) -> Result<Endpoints, Error> {
        let mut place = Endpoints {
            service: service.to_owned(),
            named: vec![],
        };
        let Some(text) = text else {
            return Ok(place);
        };
        let fault = |problem: String| {
            let apis = apis.iter().map(|api| format!("[,{api}=URL]"));
            let values = values.iter().map(|value| format!("[,{value}=TEXT]"));
            let named: String = apis.chain(values).collect();
            Error::Url {
                url: text.to_owned(),
                problem: format!("{problem}; expected [http://HOST[:PORT]]{named}"),
            }
        };
        for (index, part) in text.split(',').enumerate() {
            let named = part.split_once('=').and_then(|(name, text)| {
                let known = apis.iter().chain(values).find(|known| **known == name)?;
                Some((*known, text))
            });
            match named {
                Some((name, _)) if place.value(name).is_some() => {
                    return Err(fault(format!("{name} has two values")));
                }
                Some((name, url)) if apis.contains(&name) => {
                    http::check_api(url).map_err(|why| fault(format!("{name}: {why}")))?;
                    place.named.push((name, url.to_owned()));
                }
                Some((name, text)) => {
                    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
                    if text.is_empty() || !text.bytes().all(is_allowed) {
                        return Err(fault(format!("{name} is not letters, digits and hyphens")));
                    }
                    place.named.push((name, text.to_owned()));
                }
                // the usual metadata service
                None if index == 0 && part.is_empty() && text.len() > 1 => {}
                None if index == 0 => {
                    Url::check_base(part).map_err(|why| fault(why.into()))?;
                    place.service = part.to_owned();
                }
                None => return Err(fault(format!("{part:?} is not the name and URL of an API"))),
            }
        }
        Ok(place)
    }

    /// Returns the URL of an API; `None` if it is the usual one.
    pub fn api(&self, name: &str) -> Option<&str> {
        self.value(name)
    }

    /// Returns the value of a name.
    pub fn value(&self, name: &str) -> Option<&str> {
        let found = self.named.iter().find(|(known, _)| *known == name)?;
        Some(&found.1)
    }
}

#[cfg(test)]
mod tests {
    use support::mutation::mutations;

    use super::*;

    const APIS: [&str; 2] = ["one", "two"];

    fn parse(text: &str) -> Result<Endpoints, Error> {
        Endpoints::parse(Some(text), "http://usual", &APIS, &["three"])
    }

    #[test]
    fn a_place_names_the_service_and_some_apis() {
        let place = Endpoints::parse(None, "http://usual", &APIS, &[]).unwrap();
        assert_eq!((&*place.service, place.api("one")), ("http://usual", None));
        let place = parse("http://10.0.0.1,two=https://b,one=https://a/x").unwrap();
        assert_eq!(place.service, "http://10.0.0.1");
        assert_eq!(place.api("one"), Some("https://a/x"));
        assert_eq!(place.api("two"), Some("https://b"));
        assert_eq!(parse(",three=a-1").unwrap().value("three"), Some("a-1"));
        let place = parse("two=https://b").unwrap();
        assert_eq!(place.service, "http://usual");
        for (bad, why) in [
            ("", "does not begin with http://"),
            ("four=https://a", "does not begin with http://"),
            ("three=a b", "letters, digits"),
            ("three=", "letters, digits"),
            ("three=a,three=b", "two values"),
            ("http://a,", "name and URL of an API"),
            ("http://a,http://b", "name and URL of an API"),
            ("one=https://a,one=https://b", "two values"),
            ("one=http://a", "need https"),
        ] {
            let error = parse(bad).unwrap_err().to_string();
            assert!(error.contains(why), "{bad}: {error}");
            assert!(
                error.contains("[,one=URL][,two=URL][,three=TEXT]"),
                "{error}"
            );
        }
    }

    #[test]
    fn mutated_places_are_read_or_refused() {
        let (mut good, mut bad) = (0, 0);
        for text in mutations(b"http://10.0.0.1,two=https://b,one=https://a/x", 5000) {
            match parse(&String::from_utf8_lossy(&text)) {
                Ok(place) => {
                    good += 1;
                    assert!(place.service.starts_with("http://"));
                }
                Err(_) => bad += 1,
            }
        }
        assert!(good > 100 && bad > 100, "{good} good, {bad} bad");
    }
}
