// Package conformance runs specs of Kubernetes' own end-to-end tests against a cluster and judges their report. "make
// build-conformance" builds the tests.
//
// Layer: test. Allowed imports: library.
package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"sigs.k8s.io/yaml"
)

// Run describes one run of the tests.
type Run struct {
	Programs   string // folder with ginkgo and e2e.test
	Kubeconfig string
	Kubectl    string // path
	Focus      string // regular expression for the names of specs
	Skip       string // regular expression for the names of specs that do not run; empty for none
	Processes  int    // specs that run at a time; serial specs run alone after the others
	Timeout    time.Duration
	Reports    string // folder for junit.xml, report.json and the output of the specs, e2e.log
}

// Do runs the specs and returns their results. A failed spec is a result, not an error.
func (r Run) Do(ctx context.Context) ([]Spec, error) {
	if err := os.MkdirAll(r.Reports, 0o755); err != nil {
		return nil, err
	}
	path := filepath.Join(r.Reports, "report.json")
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) { // A report of an earlier run is no result.
		return nil, err
	}
	log, err := os.Create(filepath.Join(r.Reports, "e2e.log"))
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, filepath.Join(r.Programs, "ginkgo"), r.arguments()...)
	cmd.Stdout, cmd.Stderr = log, log
	// The tests read the configuration of the cluster that they run in from these variables.
	cmd.Env = append(os.Environ(), "KUBERNETES_SERVICE_HOST=", "KUBECONFIG=")
	failed := cmd.Run()
	if err := log.Close(); err != nil {
		return nil, err
	}
	report, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("the tests ended without a report: %w\n%s", errors.Join(failed, err), end(log.Name()))
	}
	return parse(report)
}

// end returns the last lines of a file.
func end(path string) []byte {
	const size = 4 << 10
	content, err := os.ReadFile(path)
	if err != nil {
		return []byte(err.Error())
	}
	return content[max(0, len(content)-size):]
}

func (r Run) arguments() []string {
	ginkgo := []string{
		"--no-color", "--procs=" + strconv.Itoa(r.Processes), "--timeout=" + r.Timeout.String(), "--focus=" + r.Focus,
		"--output-dir=" + r.Reports, "--junit-report=junit.xml", "--json-report=report.json",
	}
	if r.Skip != "" { // An empty expression matches all names.
		ginkgo = append(ginkgo, "--skip="+r.Skip)
	}
	return append(ginkgo, filepath.Join(r.Programs, "e2e.test"), "--",
		"--provider=skeleton", "--kubeconfig="+r.Kubeconfig, "--kubectl-path="+r.Kubectl)
}

// Spec is the result of one spec.
type Spec struct {
	Name    string
	State   string // passed, skipped or a kind of failure
	Message string // of a failure, or why the spec excludes itself from this cluster
	Time    time.Duration
}

// parse reads a JSON report of Ginkgo. It leaves out the specs that the focus excludes. A failure before or after all specs is a
// result too.
func parse(report []byte) ([]Spec, error) {
	var suites []struct {
		SpecReports []struct {
			ContainerHierarchyTexts []string
			LeafNodeType            string
			LeafNodeText            string
			State                   string
			RunTime                 time.Duration
			Failure                 struct{ Message string }
		}
	}
	if err := json.Unmarshal(report, &suites); err != nil {
		return nil, fmt.Errorf("expected a JSON report of Ginkgo: %w", err)
	}
	var specs []Spec
	for _, suite := range suites {
		for _, s := range suite.SpecReports {
			spec := Spec{strings.Join(append(s.ContainerHierarchyTexts, s.LeafNodeText), " "), s.State, s.Failure.Message, s.RunTime}
			switch {
			case s.LeafNodeType != "It":
				spec.Name = s.LeafNodeType
				if s.State != "passed" {
					specs = append(specs, spec)
				}
			case s.State != "skipped" || spec.Message != "":
				specs = append(specs, spec)
			}
		}
	}
	return specs, nil
}

// Summary counts results and describes each spec that did not pass.
func Summary(specs []Spec) string {
	counts := map[string]int{}
	var lines strings.Builder
	for _, s := range specs {
		kind := s.kind()
		counts[kind]++
		if kind != "passed" {
			first, _, _ := strings.Cut(s.Message, "\n")
			fmt.Fprintf(&lines, "%s: %s: %s: %s\n", kind, s.Name, s.State, first)
		}
	}
	return fmt.Sprintf("%s%d passed, %d failed, %d excluded", lines.String(), counts["passed"], counts["failed"], counts["excluded"])
}

func (s Spec) kind() string {
	switch s.State {
	case "passed":
		return "passed"
	case "skipped", "pending":
		return "excluded"
	default:
		return "failed"
	}
}

// Failures returns an error if a spec failed, or if none passed: a focus without a match proves nothing.
func Failures(specs []Spec) error {
	passed := 0
	var errs []error
	for _, s := range specs {
		switch s.kind() {
		case "passed":
			passed++
		case "failed":
			errs = append(errs, fmt.Errorf("%s: %s: %s", s.Name, s.State, s.Message))
		}
	}
	if passed == 0 {
		errs = append(errs, fmt.Errorf("expected at least one spec that passes, found none among %d: does the focus match a spec?", len(specs)))
	}
	return errors.Join(errs...)
}

// Names returns the names of the conformance specs that match a regular expression, from the list in the tests.
func Names(ctx context.Context, programs, focus string) (names []string, err error) {
	expression, err := regexp.Compile(focus)
	if err != nil {
		return nil, err
	}
	list, err := exec.CommandContext(ctx, filepath.Join(programs, "e2e.test"), "--list-conformance-tests").Output()
	if err != nil {
		return nil, fmt.Errorf("listing the conformance specs: %w", err)
	}
	var specs []struct {
		Codename string `json:"codename"`
	}
	if err := yaml.Unmarshal(list, &specs); err != nil {
		return nil, fmt.Errorf("expected a list of conformance specs: %w", err)
	}
	for _, s := range specs {
		if expression.MatchString(s.Codename) {
			names = append(names, s.Codename)
		}
	}
	return names, nil
}

// Missing returns an error unless each of these specs passed, and no other ran.
func Missing(specs []Spec, names []string) error {
	passed := map[string]bool{}
	for _, s := range specs {
		if s.kind() == "passed" {
			passed[s.Name] = true
		}
	}
	var errs []error
	for _, name := range names {
		if !passed[name] {
			errs = append(errs, fmt.Errorf("expected that the spec %q passes, found no such result: compare the name with test/conformance/testdata/conformance.yaml of Kubernetes", name))
		}
	}
	if len(specs) != len(names) {
		errs = append(errs, fmt.Errorf("expected %d specs, found %d", len(names), len(specs)))
	}
	return errors.Join(errs...)
}
