package supervisor

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"

	"capstan.dev/capstan/internal/atomicfile"
)

// Dir contains one file per service, <name>.yaml.
const Dir = "/etc/capstan/services"

// Service is the content of a service file: one supervised process.
type Service struct {
	// Name of the service: lower case letters, digits and '-'. The file's name without .yaml.
	Name string `json:"name"`
	// Command with its arguments; the program by absolute path. It must not contain secrets.
	Command []string `json:"command"`
	// Env is added to PATH and HOME, as NAME=value.
	Env []string `json:"env,omitempty"`
	// Dir is the working directory; / by default.
	Dir string `json:"dir,omitempty"`
	// After names services that must be ready before the first start of this service.
	After []string `json:"after,omitempty"`
	// Requires names services without which this service cannot work. At a reload it stops before one of them stops, and it
	// starts again with them. It does not wait for them at its start, and it continues when one of them crashes.
	Requires []string `json:"requires,omitempty"`
	// Ready defines when the service is ready. Without it, the service is ready as soon as it runs.
	Ready *Probe `json:"ready,omitempty"`
	// StopSignal by name; SIGTERM by default.
	StopSignal string `json:"stopSignal,omitempty"`
	// StopTimeoutSeconds until SIGKILL; 10 by default.
	StopTimeoutSeconds int `json:"stopTimeoutSeconds,omitempty"`
	// OOMScoreAdj of the process, from -1000 to 1000; -800 by default. A score that is not well above that of PID 1 is
	// raised, because PID 1 must be the last process that is killed. Lowering needs CAP_SYS_RESOURCE.
	OOMScoreAdj *int `json:"oomScoreAdj,omitempty"`
	// KillProcessGroup is true (the default) if the rest of the process group is killed when the main process has ended.
	// It is false for containerd, whose shims outlive it.
	KillProcessGroup *bool `json:"killProcessGroup,omitempty"`
	// User of package accounts that the process runs as; root by default.
	User string `json:"user,omitempty"`
	// Capabilities, without CAP_, that the process and its children can have. If empty, root has those of the machine and a
	// User has none.
	Capabilities []string `json:"capabilities,omitempty"`
	// Owns lists files and folders that are given to the User, with their content, before each start.
	Owns []string `json:"owns,omitempty"`
	// Reads lists files that the User may read, in addition to other services.
	Reads []string `json:"reads,omitempty"`
	// Revision is any text. A change of it restarts the service at a reload.
	Revision string `json:"revision,omitempty"`
}

var namePattern = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`)

// Parse reads a service file, strictly.
func Parse(data []byte) (Service, error) {
	var s Service
	if err := yaml.UnmarshalStrict(data, &s); err != nil {
		return s, err
	}
	return s, s.Validate()
}

// Validate returns all errors of the service.
func (s Service) Validate() error {
	var errs []error
	if !namePattern.MatchString(s.Name) {
		errs = append(errs, fmt.Errorf("name %q: expected lower-case letters, digits and '-'", s.Name))
	}
	if len(s.Command) == 0 || !filepath.IsAbs(s.Command[0]) {
		errs = append(errs, fmt.Errorf("command %q: expected an absolute path and arguments", s.Command))
	}
	if s.StopSignal != "" && unix.SignalNum(s.StopSignal) == 0 {
		errs = append(errs, fmt.Errorf("stopSignal %q: expected a name such as SIGTERM", s.StopSignal))
	}
	if slices.Contains(s.After, s.Name) {
		errs = append(errs, errors.New("after: names the service itself"))
	}
	if slices.Contains(s.Requires, s.Name) {
		errs = append(errs, errors.New("requires: names the service itself"))
	}
	if s.Ready != nil {
		errs = append(errs, s.Ready.validate())
	}
	errs = append(errs, s.validateRights())
	return errors.Join(errs...)
}

// Write writes the service's file into dir, completely or not at all, and returns when it is on the disk.
func (s Service) Write(dir string) error {
	if err := s.Validate(); err != nil {
		return fmt.Errorf("service %s: %w", s.Name, err)
	}
	data, err := yaml.Marshal(s)
	if err != nil {
		return err
	}
	return atomicfile.WriteFile(filepath.Join(dir, s.Name+".yaml"), data, 0o600)
}

// Load reads all service files of dir. An unusable file gives an error and does not keep the other services from starting: unusable has the
// name of its service. A missing folder is empty.
func Load(dir string) (services []Service, unusable []string, err error) {
	paths, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
	if err != nil {
		return nil, nil, err
	}
	var errs []error
	for _, path := range paths {
		service, err := load(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue // It was removed meanwhile.
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", path, err))
			unusable = append(unusable, serviceOf(path))
			continue
		}
		services = append(services, service)
	}
	return services, unusable, errors.Join(errs...)
}

// serviceOf returns the name of the service with a file.
func serviceOf(path string) string { return strings.TrimSuffix(filepath.Base(path), ".yaml") }

func load(path string) (Service, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return Service{}, err
	}
	service, err := Parse(data)
	if want := serviceOf(path); err == nil && service.Name != want {
		err = fmt.Errorf("name is %q, expected the name of the file: %q", service.Name, want)
	}
	return service, err
}

// dependencies are the services that stop after this one.
func (s Service) dependencies() []string { return slices.Concat(s.After, s.Requires) }

// stopsAtReload returns the services that stop when wanted replaces current: those that change or disappear, and those that
// require one of them. Each comes before its dependencies.
func stopsAtReload(current, wanted map[string]Service) []string {
	stops := map[string]bool{}
	for name, service := range current {
		if want, keep := wanted[name]; !keep || !reflect.DeepEqual(want, service) {
			stops[name] = true
		}
	}
	order := stopOrder(current)
	// The services that a service requires come later in the order, so this loop starts at the end.
	for _, name := range slices.Backward(order) {
		stops[name] = stops[name] || slices.ContainsFunc(current[name].Requires, func(other string) bool { return stops[other] })
	}
	return slices.DeleteFunc(order, func(name string) bool { return !stops[name] })
}

// stopOrder sorts the names so that each service comes before its dependencies.
func stopOrder(services map[string]Service) []string {
	var order []string
	seen := map[string]bool{}
	var visit func(name string)
	visit = func(name string) {
		service, known := services[name]
		if seen[name] || !known {
			return
		}
		seen[name] = true
		for _, dep := range service.dependencies() {
			visit(dep)
		}
		order = append(order, name)
	}
	names := make([]string, 0, len(services))
	for name := range services {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		visit(name)
	}
	slices.Reverse(order)
	return order
}

// cycle returns the services of a cycle of dependencies, or nil.
func cycle(services map[string]Service) []string {
	const visiting, done = 1, 2
	state := map[string]int{}
	var path []string
	var visit func(name string) []string
	visit = func(name string) []string {
		path = append(path, name)
		defer func() { path = path[:len(path)-1] }()
		state[name] = visiting
		for _, dep := range services[name].dependencies() {
			if state[dep] == visiting {
				return append(slices.Clone(path[slices.Index(path, dep):]), dep)
			}
			if state[dep] == 0 {
				if found := visit(dep); found != nil {
					return found
				}
			}
		}
		state[name] = done
		return nil
	}
	for name := range services {
		if state[name] == 0 {
			if found := visit(name); found != nil {
				return found
			}
		}
	}
	return nil
}

func (s Service) stopSignal() syscall.Signal {
	if s.StopSignal == "" {
		return syscall.SIGTERM
	}
	return unix.SignalNum(s.StopSignal)
}

func (s Service) stopTimeout() time.Duration {
	if s.StopTimeoutSeconds <= 0 {
		return 10 * time.Second
	}
	return time.Duration(s.StopTimeoutSeconds) * time.Second
}

// defaultOOMScore makes the kernel kill pods before services.
const defaultOOMScore = -800

func (s Service) oomScore() int {
	if s.OOMScoreAdj == nil {
		return defaultOOMScore
	}
	return *s.OOMScoreAdj
}

func (s Service) killsGroup() bool { return s.KillProcessGroup == nil || *s.KillProcessGroup }
