package cli

import (
	"encoding/base64"
	"fmt"
	"regexp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

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
	"failureDomain", "failureDomains", "first", "free", "gateway", "host", "inPlace", "image", "kernelVersion", "kubeletVersion", "kubernetesVersion", "last", "machineCIDR",
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
// variables, and annotations of others.
func redactObject(o *unstructured.Unstructured) *unstructured.Unstructured {
	out := o.DeepCopy()
	out.SetManagedFields(nil)
	labels, annotations := out.GetLabels(), out.GetAnnotations()
	for key, value := range annotations {
		if !ownDomains.MatchString(key) || !plainValue.MatchString(value) {
			annotations[key] = redacted(value)
		}
	}
	for _, part := range []string{"spec", "status", "metadata"} {
		if value, found := out.Object[part]; found {
			out.Object[part] = redactValue(part, value)
		}
	}
	// Labels are names of objects, and the bundle needs them to relate objects.
	out.SetLabels(labels)
	out.SetAnnotations(annotations)
	return out
}

// redactValue redacts the value of a field, or an item of a list with the name of its field.
func redactValue(key string, value any) any {
	switch v := value.(type) {
	case map[string]any:
		for name, item := range v {
			v[name] = redactValue(name, item)
		}
	case []any:
		for i, item := range v {
			v[i] = redactValue(key, item)
		}
	case string:
		if v != "" && !slices.Contains(plainKeys, key) {
			return redacted(v)
		}
	}
	return value
}

// secretPatterns are texts that are secret wherever they are. The first group, if there is one, stays.
var secretPatterns = []*regexp.Regexp{
	regexp.MustCompile(`(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----`),
	regexp.MustCompile(`eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*`),                                                                  // JSON web tokens
	regexp.MustCompile(`\b[a-z0-9]{6}\.[a-z0-9]{16}\b`),                                                                                         // bootstrap tokens
	regexp.MustCompile(`(?i)(authorization:\s*|bearer\s+|basic\s+)[A-Za-z0-9+/._~=-]{8,}`),                                                      // headers
	regexp.MustCompile(`(://[^/\s:@]*:)[^/\s@]+@`),                                                                                              // passwords in URLs
	regexp.MustCompile(`(?i)((?:password|passwd|secret|token|api[_-]?key|access[_-]?key|private[_-]?key)[A-Za-z_]*"?\s*[=:]\s*"?)[^\s",}]{4,}`), // assignments
}

// redactText removes secrets from a log: known ones, and texts that look like secrets.
func redactText(text string, known *strings.Replacer) string {
	text = known.Replace(text)
	for _, p := range secretPatterns {
		text = p.ReplaceAllString(text, "${1}(removed)")
	}
	return text
}

// minSecret is the length from which the value of a Secret is searched in texts. Shorter ones are words and numbers.
const minSecret = 8

// knownSecrets replaces the values of Secrets, as they are and in base64. Lines of longer values are searched one by one, so
// that a key is found in any indentation.
func knownSecrets(secrets []corev1.Secret) *strings.Replacer {
	var values []string
	for i := range secrets {
		for _, value := range secrets[i].Data {
			encoded := base64.StdEncoding.EncodeToString(value)
			for _, line := range append(strings.Split(string(value), "\n"), encoded) {
				if line = strings.TrimSpace(line); len(line) >= minSecret && !strings.ContainsAny(line, " ") {
					values = append(values, line)
				}
			}
		}
	}
	// A replacer takes the first of several matches: the longest must be first.
	slices.SortFunc(values, func(a, b string) int { return len(b) - len(a) })
	var pairs []string
	for _, value := range slices.Compact(values) {
		pairs = append(pairs, value, "(removed)")
	}
	return strings.NewReplacer(pairs...)
}
