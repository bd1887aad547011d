package inplace

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"maps"
	"slices"
	"strings"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
)

// Fixed are digests of the parts of a CapstanConfig that only another machine can have in another form. The machines of a pool
// share one CapstanConfig, which has no history. So each machine records the parts that it was made with.
type Fixed map[string]string

// maxFixed limits the record on a machine. With more files, they have one digest.
const maxFixed = 40

// repeatable marks the digest of a file that an update may write again.
const repeatable = "r:"

// FixedParts returns the digests of a CapstanConfig.
func FixedParts(spec bootstrapv1.CapstanConfigSpec) Fixed {
	out, files, object := Fixed{}, Fixed{}, toMap(spec)
	for _, f := range configFields {
		value := at(object, f.path)
		switch {
		case value == nil || f.path == "role" || f.path == "restore":
		case f.path == "files":
			for path, file := range byPath(value) {
				digest := sum(without(file, "repeatable"))
				if isRepeatable(file) {
					digest = repeatable + digest
				}
				files["files["+path+"]"] = digest
			}
		case f.path == "cluster.etcd.external.endpoints":
			out[f.path] = "set"
		case len(Blocking(f.decide(f, nil, value))) > 0, f.path == taints:
			out[f.path] = sum(value)
		}
	}
	if len(files) > maxFixed {
		files = Fixed{"files": sum(files)}
	}
	maps.Copy(out, files)
	return out
}

// Changes returns the parts that differ in another machine, sorted by path.
func (f Fixed) Changes(desired Fixed) []Change {
	paths := slices.Collect(maps.Keys(f))
	for path := range desired {
		if _, both := f[path]; !both {
			paths = append(paths, path)
		}
	}
	slices.Sort(paths)
	var out []Change
	for _, path := range paths {
		has, want := f[path], desired[path]
		same := strings.TrimPrefix(has, repeatable) == strings.TrimPrefix(want, repeatable)
		if same || strings.HasPrefix(want, repeatable) {
			continue
		}
		out = append(out, Change{Path: path, Verdict: Replace, Why: whyFixed(path, want)})
	}
	return out
}

func whyFixed(path, want string) string {
	if path == taints {
		return workerTaints.Why
	}
	for _, f := range configFields {
		if f.path == path {
			return f.why
		}
	}
	if want == "" {
		return "an update does not remove files"
	}
	return "the file is not declared repeatable"
}

// String returns the stored form.
func (f Fixed) String() string {
	data, err := json.Marshal(f)
	if err != nil { // Strings can always be written.
		return ""
	}
	return string(data)
}

// ReadFixed reads the stored form. It returns nil for a text that is not in this form.
func ReadFixed(text string) Fixed {
	var out Fixed
	if json.Unmarshal([]byte(text), &out) != nil {
		return nil
	}
	return out
}

func sum(value any) string {
	data, err := json.Marshal(value)
	if err != nil {
		panic(err) // Parsed from JSON.
	}
	hash := sha256.Sum256(data)
	return hex.EncodeToString(hash[:6])
}
