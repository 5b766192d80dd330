//! Lists that an API returns in pages.

use std::collections::HashSet;

/// Maximum number of pages of a list: half a million machines in pages of 500.
const MAX_PAGES: usize = 1000;
/// Maximum number of entries of a list. No Kubernetes cluster has so many nodes. The limit stops an API whose list never ends.
pub const MAX_ENTRIES: usize = 200_000;

/// Returns the entries of all pages. `page` gets the token of the page (`None`: the first), and returns its entries and the token
/// of the next page. An error of `page` is returned: a list must be complete.
///
/// # Errors
/// The error of `page`. If the pages repeat or are too many, `endless` makes the error from a clause.
pub fn all<T, E>(
    mut page: impl FnMut(Option<&str>) -> Result<(Vec<T>, Option<String>), E>,
    endless: impl Fn(String) -> E,
) -> Result<Vec<T>, E> {
    let (mut entries, mut seen) = (vec![], HashSet::new());
    let mut mark: Option<String> = None;
    loop {
        let (more, next) = page(mark.as_deref())?;
        entries.extend(more);
        if entries.len() > MAX_ENTRIES {
            return Err(endless(format!(
                "a list of more than {MAX_ENTRIES} entries"
            )));
        }
        let Some(next) = next.filter(|next| !next.is_empty()) else {
            return Ok(entries);
        };
        if !seen.insert(next.clone()) {
            return Err(endless("a list whose pages repeat".into()));
        }
        if seen.len() >= MAX_PAGES {
            return Err(endless(format!("a list of more than {MAX_PAGES} pages")));
        }
        mark = Some(next);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Endless(String);

    fn pages(of: impl Fn(usize) -> (usize, Option<String>)) -> Result<Vec<usize>, Endless> {
        all(
            |mark| {
                let number = mark.map_or(0, |mark| mark.parse().unwrap());
                let (count, next) = of(number);
                Ok((vec![number; count], next))
            },
            Endless,
        )
    }

    #[test]
    fn pages_are_joined_and_endless_ones_refused() {
        let three = |n: usize| (2, (n < 2).then(|| (n + 1).to_string()));
        assert_eq!(pages(three).unwrap(), [0, 0, 1, 1, 2, 2]);
        // some APIs end a list with an empty token
        assert_eq!(pages(|_| (1, Some(String::new()))).unwrap(), [0]);
        let Endless(error) = pages(|n| (1, Some(((n + 1) % 5).to_string()))).unwrap_err();
        assert!(error.contains("repeat"), "{error}");
        let Endless(error) = pages(|n| (0, Some((n + 1).to_string()))).unwrap_err();
        assert!(error.contains("1000 pages"), "{error}");
        let Endless(error) = pages(|n| (5000, Some((n + 1).to_string()))).unwrap_err();
        assert!(error.contains("200000 entries"), "{error}");
    }
}
