//! Where the services of a cloud are, as `--metadata` says: `[URL][,NAME=URL]..`. The first URL is the metadata service's. A name and a
//! URL replace the usual address of an API, for private endpoints and sovereign clouds.

use super::http::check_api;
use super::{Error, clause_on_url};

/// The services' places.
#[derive(Debug)]
pub struct Place {
    /// The URL of the metadata service.
    pub service: String,
    apis: Vec<(&'static str, String)>,
}

impl Place {
    /// Parses a place. `service` is the usual URL of the metadata service, and `apis` has the names of the APIs.
    pub fn parse(text: Option<&str>, service: &str, apis: &[&'static str]) -> Result<Place, Error> {
        let mut place = Place {
            service: service.to_owned(),
            apis: vec![],
        };
        let Some(text) = text else {
            return Ok(place);
        };
        let fault = |problem: String| {
            let named: String = apis.iter().map(|api| format!("[,{api}=URL]")).collect();
            Error::Url {
                url: text.to_owned(),
                problem: format!("{problem}; expected [http://HOST[:PORT]]{named}"),
            }
        };
        for (index, part) in text.split(',').enumerate() {
            let named = part.split_once('=').and_then(|(name, url)| {
                let name = apis.iter().find(|api| **api == name)?;
                Some((*name, url))
            });
            match named {
                Some((name, _)) if place.api(name).is_some() => {
                    return Err(fault(format!("{name} has two URLs")));
                }
                Some((name, url)) => {
                    check_api(url).map_err(|why| fault(format!("{name}: {why}")))?;
                    place.apis.push((name, url.to_owned()));
                }
                None if index == 0 => {
                    clause_on_url(part).map_err(fault)?;
                    place.service = part.to_owned();
                }
                None => return Err(fault(format!("{part:?} is no API's name and URL"))),
            }
        }
        Ok(place)
    }

    /// Returns the URL of an API; `None` if it is the usual one.
    pub fn api(&self, name: &str) -> Option<&str> {
        let found = self.apis.iter().find(|(api, _)| *api == name)?;
        Some(&found.1)
    }
}

#[cfg(test)]
mod tests {
    use support::mutation::mutations;

    use super::*;

    const APIS: [&str; 2] = ["one", "two"];

    fn parse(text: &str) -> Result<Place, Error> {
        Place::parse(Some(text), "http://usual", &APIS)
    }

    #[test]
    fn a_place_names_the_service_and_some_apis() {
        let place = Place::parse(None, "http://usual", &APIS).unwrap();
        assert_eq!((&*place.service, place.api("one")), ("http://usual", None));
        let place = parse("http://10.0.0.1,two=https://b,one=https://a/x").unwrap();
        assert_eq!(place.service, "http://10.0.0.1");
        assert_eq!(place.api("one"), Some("https://a/x"));
        assert_eq!(place.api("two"), Some("https://b"));
        let place = parse("two=https://b").unwrap();
        assert_eq!(place.service, "http://usual");
        for (bad, why) in [
            ("", "does not begin with http://"),
            ("three=https://a", "does not begin with http://"),
            ("http://a,", "no API"),
            ("http://a,http://b", "no API"),
            ("one=https://a,one=https://b", "two URLs"),
            ("one=http://a", "need https"),
        ] {
            let error = parse(bad).unwrap_err().to_string();
            assert!(error.contains(why), "{bad}: {error}");
            assert!(error.contains("[,one=URL][,two=URL]"), "{error}");
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
