package cli

import (
	"cmp"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// publicKeys are the fields whose texts stay as they are, because they name objects and states. The other plainKeys can contain free text.
var publicKeys = []string{
	"apiGroup", "apiVersion", "clusterName", "generateName", "hostID", "hostName", "hostname", "id", "kind", "lastTransitionTime", "name", "namespace",
	"phase", "providerID", "reason", "resourceVersion", "role", "state", "status", "type", "uid",
}

// plainKeys are the fields whose texts a support bundle contains. All other texts are left out: a new field is never
// published by mistake. Numbers and booleans are always contained.
var plainKeys = []string{
	// identity
	"apiGroup", "apiVersion", "class", "cluster", "clusterName", "hostname", "hostName", "hostID", "id", "kind", "name", "namespace", "poolRef",
	"providerID", "role", "uid", "boxID",
	// metadata
	"creationTimestamp", "deletionTimestamp", "finalizers", "generateName", "resourceVersion",
	// states
	"action", "completionTime", "lastTransitionTime", "lastUpdated", "message", "phase", "reason", "startTime", "state", "status", "step", "since", "time", "type",
	// versions, sizes and addresses
	"address", "addresses", "allocatable", "architecture", "capacity", "cidrBlocks", "containerRuntimeVersion", "cpu", "cpus", "disk", "diskBackend", "ephemeral-storage",
	"failureDomain", "failureDomains", "first", "free", "gateway", "host", "inPlace", "image", "kernelVersion", "kubeletVersion", "kubernetesVersion", "last", "localVolumeSizes", "machineCIDR",
	"maxSurge", "maxUnavailable", "maxInFlight", "memory", "operatingSystem", "osImage", "order", "prefix", "serviceDomain", "size", "total", "version", "versions",
	// places of files, not their contents
	"path", "owner", "permissions", "encoding",
}

// redacted replaces a text.
func redacted(text string) string { return fmt.Sprintf("(%d characters removed)", len([]rune(text))) }

// ownDomains are the domains whose annotations are states and never contents, unless they are long.
var ownDomains = regexp.MustCompile(`^([a-z0-9-]+\.)*(cluster\.x-k8s\.io|capstan\.dev)/`)

// plainValue is a value such as a name, a number or a time.
var plainValue = regexp.MustCompile(`^[A-Za-z0-9._:/-]{0,63}$`)

// redactObject returns a copy of an object without the texts that can be secret: contents of files, commands, arguments,
// variables, annotations that other programs define, and known secrets. The names of fields stay, also if a known secret equals one.
func redactObject(o *unstructured.Unstructured, known *knownValues) *unstructured.Unstructured {
	out := o.DeepCopy()
	out.SetManagedFields(nil)
	labels, annotations := out.GetLabels(), out.GetAnnotations()
	for key, value := range annotations {
		if !ownDomains.MatchString(key) || !plainValue.MatchString(value) {
			annotations[key] = redacted(value)
			continue
		}
		annotations[key] = redactText(value, known)
	}
	// Labels are names of objects, and the bundle needs them to relate objects.
	for key, value := range labels {
		labels[key] = redactText(value, known)
	}
	for _, part := range []string{"spec", "status", "metadata"} {
		if value, found := out.Object[part]; found {
			out.Object[part] = redactValue(part, value, known)
		}
	}
	out.SetLabels(labels)
	out.SetAnnotations(annotations)
	return out
}

// redactValue redacts the value of a field, or an item of a list with the name of its field.
func redactValue(key string, value any, known *knownValues) any {
	switch v := value.(type) {
	case map[string]any:
		for name, item := range v {
			v[name] = redactValue(name, item, known)
		}
	case []any:
		for i, item := range v {
			v[i] = redactValue(key, item, known)
		}
	case string:
		switch {
		case v == "" || slices.Contains(publicKeys, key):
		case slices.Contains(plainKeys, key):
			return redactText(v, known)
		default:
			return redacted(v)
		}
	}
	return value
}

// publicTexts adds the texts of an object that the bundle contains as they are: names of objects and states. They are no secrets, also if
// a Secret contains one of them.
func publicTexts(key string, value any, public map[string]bool) {
	switch v := value.(type) {
	case map[string]any:
		for name, item := range v {
			publicTexts(name, item, public)
		}
	case []any:
		for _, item := range v {
			publicTexts(key, item, public)
		}
	case string:
		if slices.Contains(publicKeys, key) {
			public[v] = true
		}
	}
}

// secretPatterns are texts that are secret wherever they are. The first group, if there is one, stays.
var secretPatterns = []*regexp.Regexp{
	regexp.MustCompile(`(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----`),
	regexp.MustCompile(`eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*`),                                                                        // JSON web tokens
	regexp.MustCompile(`\b[a-z0-9]{6}\.[a-z0-9]{16}\b`),                                                                                               // bootstrap tokens
	regexp.MustCompile(`(?i)(authorization:\s*|bearer\s+|basic\s+)[A-Za-z0-9+/._~=-]{8,}`),                                                            // headers
	regexp.MustCompile(`(://[^/\s:@]*:)[^/\s@]+@`),                                                                                                    // passwords in URLs
	regexp.MustCompile(`(?i)((?:password|passwd|secret|token|api[_-]?key|access[_-]?key|private[_-]?key)[A-Za-z_]*\\?"?\s*[=:]\s*\\?"?)[^\s",}]{4,}`), // assignments
}

// redactText removes secrets from a log: known ones, and texts that look like secrets.
func redactText(text string, known *knownValues) string {
	text = known.replace(text)
	for _, p := range secretPatterns {
		text = p.ReplaceAllString(text, "${1}(removed)")
	}
	return text
}

// minSecret is the length from which the value of a Secret is searched in texts. Shorter ones are words and numbers.
const minSecret = 8

// knownValues are the values of Secrets. Each mark in place of a value names its Secret: a tenant can fill a Secret with words of logs, and
// the reader then sees which Secret this is.
type knownValues struct {
	replacer *strings.Replacer
	marks    map[string]string // names of Secrets by their mark
}

// replace replaces the values in a text.
func (k *knownValues) replace(text string) string {
	if k == nil {
		return text
	}
	return k.replacer.Replace(text)
}

// frequent returns how often values of a Secret were removed, for those with at least so many.
func (k *knownValues) frequent(files map[string][]byte, least int) map[string]int {
	counts := map[string]int{}
	for _, data := range files {
		for _, mark := range removedMark.FindAllString(string(data), -1) {
			if name := k.marks[mark]; name != "" {
				counts[name]++
			}
		}
	}
	maps.DeleteFunc(counts, func(_ string, n int) bool { return n < least })
	return counts
}

var removedMark = regexp.MustCompile(`\(removed:[a-z0-9./-]+\)`)

// knownSecrets returns the values of Secrets, as they are, in base64, and as they are between quotes. Lines of longer values are
// searched one by one, so that a key is found in any indentation. Public texts stay, and so do the values of the Secrets to keep.
func knownSecrets(secrets []corev1.Secret, public map[string]bool, keep []string) *knownValues {
	known := &knownValues{marks: map[string]string{}}
	markOf := map[string]string{}
	for i := range secrets {
		name := secrets[i].Namespace + "/" + secrets[i].Name
		if slices.Contains(keep, name) {
			continue
		}
		mark := "(removed:" + name + ")"
		known.marks[mark] = name
		for _, value := range secrets[i].Data {
			for _, line := range searched(value) {
				if !public[line] {
					markOf[line] = mark
				}
			}
		}
	}
	// A replacer takes the first of several matches: the longest must be first.
	values := slices.SortedFunc(maps.Keys(markOf), func(a, b string) int { return cmp.Or(len(b)-len(a), strings.Compare(a, b)) })
	var pairs []string
	for _, value := range values {
		pairs = append(pairs, value, markOf[value])
	}
	known.replacer = strings.NewReplacer(pairs...)
	return known
}

// searched returns the texts of a value that are searched.
func searched(value []byte) (out []string) {
	for _, line := range append(strings.Split(string(value), "\n"), base64.StdEncoding.EncodeToString(value)) {
		if line = strings.TrimSpace(line); len(line) >= minSecret && !strings.ContainsAny(line, " ") {
			out = append(out, line, quoted(strconv.Quote(line)), quoted(inJSON(line)))
		}
	}
	return out
}

// quoted is a text as logs and documents contain it between quotes.
func quoted(text string) string { return text[1 : len(text)-1] }

func inJSON(text string) string {
	data, err := json.Marshal(text)
	if err != nil {
		panic(err) // It is a string.
	}
	return string(data)
}
