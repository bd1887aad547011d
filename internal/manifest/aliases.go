package manifest

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	yamlv3 "go.yaml.in/yaml/v3"
	"k8s.io/apimachinery/pkg/util/yaml"
)

// maxGrowth is the largest growth of a stream of documents, in bytes, when its aliases are replaced by the nodes that they name.
const maxGrowth = 4 << 20

// CheckAliases returns an error if a stream of YAML documents is too large with its aliases replaced. A decoder of Kubernetes replaces
// them: a text of 60 KB then needs gigabytes and minutes. Call it before such a decoder reads the text of a tenant. Errors do not quote
// the text.
func CheckAliases(data []byte) error {
	if !bytes.ContainsRune(data, '&') || isJSON(data) {
		return nil // An alias needs an anchor, and JSON has none.
	}
	left := len(data) + maxGrowth
	// The documents are separated as the decoder does it.
	for reader := yaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(data))); ; {
		part, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			left, err = without(part, left)
		}
		if err != nil {
			return err
		}
	}
}

// isJSON is true if a text consists of JSON values only, and the first one is an object. Decoders of Kubernetes read such a text as JSON.
// YAML allows no second object in a document.
func isJSON(data []byte) bool {
	if !bytes.HasPrefix(bytes.TrimSpace(data), []byte("{")) {
		return false
	}
	for decoder := json.NewDecoder(bytes.NewReader(data)); ; {
		var value json.RawMessage
		if err := decoder.Decode(&value); err != nil {
			return errors.Is(err, io.EOF)
		}
	}
}

// without subtracts the size of documents from a number of bytes. A value counts once for each alias that names it. The parser does not
// replace aliases.
func without(documents []byte, left int) (int, error) {
	for decoder := yamlv3.NewDecoder(bytes.NewReader(documents)); ; {
		var document yamlv3.Node
		err := decoder.Decode(&document)
		if errors.Is(err, io.EOF) {
			return left, nil
		}
		if err != nil {
			return 0, errors.New("expected YAML documents; a document cannot be read")
		}
		if left -= (&expanded{left, map[*yamlv3.Node]int{}}).size(&document); left < 0 {
			return 0, fmt.Errorf("expected aliases that add at most %d MiB, found more: write the values instead of aliases", maxGrowth>>20)
		}
	}
}

// expanded contains the sizes of nodes with replaced aliases. A size above the limit counts as one more than the limit, however often
// aliases multiply it.
type expanded struct {
	limit int
	sizes map[*yamlv3.Node]int
}

func (e *expanded) size(n *yamlv3.Node) int {
	if size, seen := e.sizes[n]; seen {
		return size
	}
	e.sizes[n] = e.limit + 1 // An anchor that contains itself has no end.
	size := len(n.Value)
	if n.Alias != nil {
		size = e.size(n.Alias)
	}
	for _, child := range n.Content {
		size = min(size+1+e.size(child), e.limit+1)
	}
	e.sizes[n] = size
	return size
}
