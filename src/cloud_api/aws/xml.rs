//! XML of the APIs. It is read in place and without recursion, and definitions of entities are refused.

use std::fmt;

use cloud::http::excerpt;
use roxmltree::{Document, ParsingOptions};

pub use roxmltree::Node;

/// Maximum number of nodes of a page's XML: a described instance has about 250.
const MAX_NODES: u32 = 2_000_000;

/// The answer is not XML, or has entities or too many nodes.
#[derive(Debug)]
pub struct NotXml {
    /// The beginning of the answer.
    beginning: String,
    why: String,
}

impl fmt::Display for NotXml {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} ({})", self.beginning, self.why)
    }
}

impl std::error::Error for NotXml {}

/// Parses XML.
pub fn document(body: &[u8]) -> Result<Document<'_>, NotXml> {
    let fault = |error: String| NotXml {
        beginning: excerpt(body),
        why: excerpt(error.as_bytes()),
    };
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

/// Returns the text of the element at a path; empty without one.
pub fn text_at<'a>(item: Node<'a, '_>, path: &[&str]) -> &'a str {
    let found = path.iter().try_fold(item, |node, name| child(node, name));
    found.and_then(|node| node.text()).unwrap_or_default()
}
