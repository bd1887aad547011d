// Package accessapi is the API of the logs, shells and images of machines, as the manager serves it and the command uses it. The API
// server of the management cluster forwards its requests to the manager (aggregation).
//
// Layer: contract. Allowed imports: api, library.
package accessapi

import (
	"fmt"
	"net/url"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// GroupVersion of the API. It is another group than that of CapstanMachines, so that a role with all resources of that group
// does not contain shells.
var GroupVersion = schema.GroupVersion{Group: "machines.capstan.dev", Version: "v1alpha1"}

// Resource is the resource of machines in this group. It has subresources only.
const Resource = "capstanmachines"

// The subresources.
const (
	Log  = "log"
	Exec = "exec"
	// Images loads image archives. API servers end requests after a minute, except those for a few names of subresources; an upload
	// takes longer. Its path therefore has Proxy in front of it, to which a user needs a right too.
	Images = "images"
	Proxy  = "proxy"
)

const (
	// InitService is the log of PID 1 and of the bootstrap.
	InitService = "init"
	// MaxTailLines is the largest number of lines that a client can ask for.
	MaxTailLines = 1_000_000
	// maxWords is the largest number of words of a command, and maxWord the largest size of one in bytes.
	maxWords, maxWord = 256, 16 << 10
)

// Root is the path of the API.
func Root() string { return "/apis/" + GroupVersion.String() }

// Path returns the path of a subresource of a machine.
func Path(namespace, name, subresource string) string {
	if subresource == Images {
		subresource = path.Join(Proxy, Images)
	}
	return path.Join(Root(), "namespaces", namespace, Resource, name, subresource)
}

// LoadedImages is the answer to an archive.
type LoadedImages struct {
	// Images are the names of the images in the archive.
	Images []string `json:"images"`
}

// Discovery describes the API to clients. A WebSocket starts with GET, so exec has both verbs.
func Discovery() *metav1.APIResourceList {
	return &metav1.APIResourceList{
		TypeMeta:     metav1.TypeMeta{APIVersion: "v1", Kind: "APIResourceList"},
		GroupVersion: GroupVersion.String(),
		APIResources: []metav1.APIResource{
			{Name: Resource + "/" + Log, Namespaced: true, Kind: "MachineLog", Verbs: metav1.Verbs{"get"}},
			{Name: Resource + "/" + Exec, Namespaced: true, Kind: "MachineExec", Verbs: metav1.Verbs{"get", "create"}},
			{Name: Resource + "/" + Proxy, Namespaced: true, Kind: "MachineImages", Verbs: metav1.Verbs{"create"}},
		},
	}
}

// LogOptions select a log.
type LogOptions struct {
	// Service is the name of a service, or InitService.
	Service string
	// Follow waits for new lines.
	Follow bool
	// TailLines is the number of lines from the end; 0 for all.
	TailLines int32
}

// Query encodes the options.
func (o LogOptions) Query() url.Values {
	return url.Values{"service": {o.Service}, "follow": {strconv.FormatBool(o.Follow)}, "tailLines": {strconv.Itoa(int(o.TailLines))}}
}

var serviceName = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{0,62}$`)

// CheckService returns why no service of a machine has a name, which becomes a part of a path.
func CheckService(name string) error {
	if !serviceName.MatchString(name) {
		return fmt.Errorf("expected the name of a service such as kubelet, found %.80q", name)
	}
	return nil
}

// ParseLogOptions decodes and checks options. Without a service it is InitService.
func ParseLogOptions(q url.Values) (o LogOptions, err error) {
	if err := refuseOthers(q, "service", "follow", "tailLines"); err != nil {
		return o, err
	}
	if o.Service = q.Get("service"); o.Service == "" {
		o.Service = InitService
	}
	if err := CheckService(o.Service); err != nil {
		return o, err
	}
	if o.Follow, err = flag(q, "follow"); err != nil {
		return o, err
	}
	if text := q.Get("tailLines"); text != "" {
		lines, err := strconv.ParseInt(text, 10, 32)
		if err != nil || lines < 0 || lines > MaxTailLines {
			return o, fmt.Errorf("tailLines: expected a number from 0 (all lines) to %d, found %.80q", MaxTailLines, text)
		}
		o.TailLines = int32(lines)
	}
	return o, nil
}

// ExecOptions describe a command.
type ExecOptions struct {
	// Command is the program with its arguments; a login shell if it is empty.
	Command []string
	// Stdin is true if the client sends a standard input.
	Stdin bool
	// TTY is true if the command gets a terminal.
	TTY bool
	// Term is the type of the terminal of the client.
	Term string
}

// Query encodes the options.
func (o ExecOptions) Query() url.Values {
	return url.Values{"command": o.Command, "stdin": {strconv.FormatBool(o.Stdin)}, "tty": {strconv.FormatBool(o.TTY)}, "term": {o.Term}}
}

var termName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9.+_-]{0,63}$`)

// ParseExecOptions decodes and checks options.
func ParseExecOptions(q url.Values) (o ExecOptions, err error) {
	if err := refuseOthers(q, "command", "stdin", "tty", "term"); err != nil {
		return o, err
	}
	o.Command, o.Term = q["command"], q.Get("term")
	if o.Stdin, err = flag(q, "stdin"); err != nil {
		return o, err
	}
	if o.TTY, err = flag(q, "tty"); err != nil {
		return o, err
	}
	return o, CheckCommand(o.Command, o.Term)
}

// CheckCommand returns why no machine can run a command, or use the type of its terminal.
func CheckCommand(words []string, term string) error {
	switch {
	case len(words) > maxWords:
		return fmt.Errorf("expected a command of at most %d words, found %d", maxWords, len(words))
	case slices.ContainsFunc(words, func(w string) bool { return len(w) > maxWord || strings.ContainsRune(w, 0) }):
		return fmt.Errorf("expected words of at most %d bytes without a zero byte, found another one", maxWord)
	case len(words) > 0 && (words[0] == "" || words[0][0] == '-'): // an option of runc
		return fmt.Errorf("expected the name of a program, found %.80q", words[0])
	case term != "" && !termName.MatchString(term):
		return fmt.Errorf("expected a type of terminal such as xterm, found %.80q", term)
	}
	return nil
}

// refuseOthers refuses parameters with other names: a misspelled one would be ignored.
func refuseOthers(q url.Values, names ...string) error {
	for name := range q {
		if !slices.Contains(names, name) {
			return fmt.Errorf("%.80q: expected one of the parameters %v", name, names)
		}
	}
	return nil
}

func flag(q url.Values, name string) (bool, error) {
	text := q.Get(name)
	if text == "" {
		return false, nil
	}
	on, err := strconv.ParseBool(text)
	if err != nil {
		return false, fmt.Errorf("%s: expected true or false, found %.80q", name, text)
	}
	return on, nil
}
