// Package cloudconfig parses the cloud-config of bootstrap providers (IM-08).
//
// It is strict: one error names everything that is not supported, so that no part of such data is applied. It supports
// the modules that Cluster API's bootstrap providers write. Modules for hardware or a clock have no meaning in a
// machine, which shares those of its host.
//
// Layer: contract. Allowed imports: api, library.
package cloudconfig

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Config is a parsed cloud-config.
type Config struct {
	Hostname         string      `yaml:"hostname"`
	FQDN             string      `yaml:"fqdn"`
	PreserveHostname bool        `yaml:"preserve_hostname"`
	BootCommands     []Command   `yaml:"bootcmd"`
	RunCommands      []Command   `yaml:"runcmd"`
	Files            []File      `yaml:"write_files"`
	Users            []User      `yaml:"users"`
	NTP              *NTP        `yaml:"ntp"`
	DiskSetup        yaml.Node   `yaml:"disk_setup"`
	FSSetup          []yaml.Node `yaml:"fs_setup"`
	Mounts           []yaml.Node `yaml:"mounts"`
}

// Command is a shell command line, or a program with its arguments.
type Command struct {
	Shell string
	Args  []string
}

// String returns the command as a shell command line.
func (c Command) String() string {
	if c.Args == nil {
		return c.Shell
	}
	quoted := make([]string, len(c.Args))
	for i, arg := range c.Args {
		quoted[i] = "'" + strings.ReplaceAll(arg, "'", `'\''`) + "'"
	}
	return strings.Join(quoted, " ")
}

// UnmarshalYAML implements yaml.Unmarshaler.
func (c *Command) UnmarshalYAML(node *yaml.Node) error {
	switch node.Kind {
	case yaml.ScalarNode:
		if node.Tag == "!!null" {
			return fmt.Errorf("line %d: the command is empty", node.Line)
		}
		c.Shell = node.Value
		return nil
	case yaml.SequenceNode:
		if len(node.Content) == 0 {
			return fmt.Errorf("line %d: the command is empty", node.Line)
		}
		c.Args = []string{}
		for _, arg := range node.Content {
			if arg.Kind != yaml.ScalarNode {
				return fmt.Errorf("line %d: a command's argument is not a string", arg.Line)
			}
			c.Args = append(c.Args, arg.Value)
		}
		return nil
	}
	return fmt.Errorf("line %d: a command is a string or a list of strings", node.Line)
}

// User is a user account to create.
type User struct {
	Name              string     `yaml:"name"`
	Passwd            string     `yaml:"passwd"`
	Gecos             string     `yaml:"gecos"`
	Groups            stringList `yaml:"groups"`
	HomeDir           string     `yaml:"homedir"`
	Inactive          string     `yaml:"inactive"`
	LockPasswd        *bool      `yaml:"lock_passwd"`
	Shell             string     `yaml:"shell"`
	PrimaryGroup      string     `yaml:"primary_group"`
	Sudo              stringList `yaml:"sudo"`
	SSHAuthorizedKeys []string   `yaml:"ssh_authorized_keys"`
	// Default is true for cloud-init's "default" user, which a machine does not have.
	Default bool `yaml:"-"`
}

// UnmarshalYAML implements yaml.Unmarshaler.
func (u *User) UnmarshalYAML(node *yaml.Node) error {
	if node.Kind == yaml.ScalarNode && node.Value == "default" {
		u.Default = true
		return nil
	}
	type plain User
	return decode(node, (*plain)(u))
}

// stringList is a list, a string with commas, or false for an empty list.
type stringList []string

// UnmarshalYAML implements yaml.Unmarshaler.
func (l *stringList) UnmarshalYAML(node *yaml.Node) error {
	if node.Kind == yaml.SequenceNode {
		return node.Decode((*[]string)(l))
	}
	if node.Tag == "!!bool" && node.Value == "false" || node.Tag == "!!null" {
		return nil
	}
	if node.Kind != yaml.ScalarNode {
		return fmt.Errorf("line %d: expected a string or a list of strings", node.Line)
	}
	*l = []string{node.Value}
	return nil
}

// NTP configures a time server.
type NTP struct {
	Enabled *bool    `yaml:"enabled"`
	Servers []string `yaml:"servers"`
	Pools   []string `yaml:"pools"`
}

const (
	header         = "#cloud-config"
	templateHeader = "## template:"
)

// Parse reads a cloud-config. metadata fills the variables of data that begins with "## template: jinja": names without
// "ds.meta_data.", such as local_hostname, instance_id and provider_id. Errors name the invalid field and never quote
// the data.
func Parse(data []byte, metadata map[string]string) (*Config, error) {
	data, err := render(data, metadata)
	if err != nil {
		return nil, err
	}
	first, _, _ := bytes.Cut(data, []byte("\n"))
	if string(bytes.TrimSpace(first)) != header {
		return nil, fmt.Errorf("the data does not begin with %q: only cloud-config is supported, not scripts, MIME archives or ignition", header)
	}
	var document yaml.Node
	decoder := yaml.NewDecoder(bytes.NewReader(data))
	if err := decoder.Decode(&document); err != nil {
		if document.IsZero() && len(bytes.TrimSpace(bytes.TrimPrefix(data, first))) == 0 {
			return &Config{}, nil
		}
		return nil, yamlError(err)
	}
	if err := decoder.Decode(new(yaml.Node)); err == nil {
		return nil, errors.New("the data has several YAML documents, expected one")
	}
	config := &Config{}
	if len(document.Content) == 0 || document.Content[0].Tag == "!!null" {
		return config, nil
	}
	if err := errors.Join(unsupported(document.Content[0])...); err != nil {
		return nil, err
	}
	if err := decode(document.Content[0], config); err != nil {
		return nil, yamlError(err)
	}
	err = config.validate()
	return config, err
}

// keys are the supported keys, with those of their items.
var (
	topKeys = []string{
		"hostname", "fqdn", "preserve_hostname", "bootcmd", "runcmd", "write_files", "users", "ntp",
		"disk_setup", "fs_setup", "mounts",
	}
	itemKeys = map[string][]string{
		"write_files": {"path", "content", "owner", "permissions", "encoding", "append", "defer"},
		"users": {
			"name", "passwd", "gecos", "groups", "homedir", "inactive", "lock_passwd", "shell",
			"primary_group", "sudo", "ssh_authorized_keys",
		},
		"ntp": {"enabled", "servers", "pools"},
	}
)

// unsupported returns an error for each key that is not supported.
func unsupported(root *yaml.Node) []error {
	if root.Kind != yaml.MappingNode {
		return []error{errors.New("the data is not a YAML mapping")}
	}
	var errs []error
	check := func(where string, node *yaml.Node, known []string) {
		node = resolve(node)
		if node.Kind != yaml.MappingNode {
			return
		}
		seen := map[string]bool{}
		for i := 0; i+1 < len(node.Content); i += 2 {
			key := node.Content[i]
			if seen[key.Value] {
				errs = append(errs, fmt.Errorf("line %d: %s%s occurs twice", key.Line, where, name(key.Value)))
			}
			seen[key.Value] = true
			if !slices.Contains(known, key.Value) {
				errs = append(errs, fmt.Errorf("line %d: %s%s is not supported", key.Line, where, name(key.Value)))
			}
		}
	}
	check("", root, topKeys)
	for i := 0; i+1 < len(root.Content); i += 2 {
		key, value := root.Content[i].Value, resolve(root.Content[i+1])
		known, nested := itemKeys[key]
		if !nested {
			continue
		}
		check(key+".", value, known)
		if value.Kind == yaml.SequenceNode {
			for j, item := range value.Content {
				check(fmt.Sprintf("%s[%d].", key, j), item, known)
			}
		}
	}
	return errs
}

// resolve follows an alias to its anchor.
func resolve(node *yaml.Node) *yaml.Node {
	if node.Kind == yaml.AliasNode {
		return node.Alias
	}
	return node
}

var namePattern = regexp.MustCompile(`^[A-Za-z0-9_.-]{1,64}$`)

// name returns a key for an error. In a damaged document any text can be a key, so only plain keys are quoted.
func name(key string) string {
	if namePattern.MatchString(key) {
		return key
	}
	return "a key that is not a name"
}

// validate refuses values that are well-formed but not supported.
func (c *Config) validate() error {
	var errs []error
	refuse := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if c.NTP != nil && (c.NTP.Enabled == nil || *c.NTP.Enabled) {
		refuse("ntp is not supported: a machine has its host's clock; configure time servers on the host")
	}
	if len(c.DiskSetup.Content) > 0 {
		refuse("disk_setup is not supported: a machine has no disks of its own")
	}
	if len(c.FSSetup) > 0 {
		refuse("fs_setup is not supported: a machine has no disks of its own")
	}
	if len(c.Mounts) > 0 {
		refuse("mounts is not supported: a machine has no disks of its own")
	}
	if (c.Hostname != "" || c.FQDN != "") && !c.PreserveHostname && !hostnamePattern.MatchString(c.HostnameToSet()) {
		refuse("hostname: expected letters, digits, '-' and '.', at most 63 characters")
	}
	for i := range c.Files {
		if err := c.Files[i].validate(); err != nil {
			refuse("write_files[%d]: %w", i, err)
		}
	}
	for i, user := range c.Users {
		if err := user.validate(); err != nil {
			refuse("users[%d]: %w", i, err)
		}
	}
	return errors.Join(errs...)
}

var (
	hostnamePattern = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?$`)
	userPattern     = regexp.MustCompile(`^[a-z_][a-z0-9_-]{0,31}$`)
)

// HostnameToSet returns the host name in the data, or "" to keep the current one.
func (c *Config) HostnameToSet() string {
	if c.PreserveHostname {
		return ""
	}
	if c.Hostname != "" {
		return c.Hostname
	}
	short, _, _ := strings.Cut(c.FQDN, ".")
	return short
}

func (u User) validate() error {
	if u.Default {
		return errors.New(`"default" is not supported: a machine has no default user`)
	}
	if !userPattern.MatchString(u.Name) {
		return errors.New("name: expected lower case letters, digits, '_' and '-', at most 32 characters")
	}
	for field, value := range map[string]string{
		"passwd": u.Passwd, "gecos": u.Gecos, "homedir": u.HomeDir, "shell": u.Shell, "primary_group": u.PrimaryGroup,
	} {
		if strings.ContainsAny(value, "\n:") {
			return fmt.Errorf("%s: has a colon or a line break", field)
		}
	}
	if u.HomeDir != "" && !filepath.IsAbs(u.HomeDir) {
		return errors.New("homedir: expected an absolute path")
	}
	for _, text := range slices.Concat(u.Sudo, u.SSHAuthorizedKeys, u.Groups) {
		if strings.Contains(text, "\n") {
			return errors.New("sudo, groups and ssh_authorized_keys: an entry has a line break")
		}
	}
	return nil
}

// decode decodes a node. yaml.Node.Decode accepts unknown fields; unsupported has refused them before.
func decode(node *yaml.Node, into any) error { return node.Decode(into) }

var quoted = regexp.MustCompile("(?s)`.*`|\"[^\"]*\"|'[^']*'")

// yamlError returns the place and kind of an error without quoted data.
func yamlError(err error) error {
	return errors.New(quoted.ReplaceAllString(err.Error(), "(data)"))
}

var variable = regexp.MustCompile(`\{\{-?\s*([A-Za-z0-9_.]+)\s*-?\}\}`)

// render replaces the variables of a jinja template. It refuses all other expressions.
func render(data []byte, metadata map[string]string) ([]byte, error) {
	first, rest, _ := bytes.Cut(data, []byte("\n"))
	line := string(bytes.TrimSpace(first))
	if !strings.HasPrefix(line, templateHeader) {
		return data, nil
	}
	if engine := strings.TrimSpace(strings.TrimPrefix(line, templateHeader)); engine != "jinja" {
		return nil, errors.New("the data is a template, but not a jinja template")
	}
	var errs []error
	unknown := map[string]bool{}
	out := variable.ReplaceAllFunc(rest, func(match []byte) []byte {
		path := string(variable.FindSubmatch(match)[1])
		key, isData := strings.CutPrefix(path, "ds.meta_data.")
		if !isData {
			key, isData = strings.CutPrefix(path, "v1.")
		}
		value, known := metadata[key]
		if !isData || !known {
			unknown[path] = true
			return nil
		}
		return []byte(value)
	})
	for _, path := range slices.Sorted(maps.Keys(unknown)) {
		errs = append(errs, fmt.Errorf("template variable %s is unknown; known are ds.meta_data.{%s}",
			name(path), strings.Join(slices.Sorted(maps.Keys(metadata)), ",")))
	}
	for _, mark := range []string{"{{", "{%", "{#"} {
		if n := bytes.Index(variable.ReplaceAll(rest, nil), []byte(mark)); n >= 0 {
			errs = append(errs, fmt.Errorf("the template contains %s, and only plain variables are supported", mark))
		}
	}
	return out, errors.Join(errs...)
}
