// Command sbom writes a software bill of materials in the SPDX format, as JSON. Its source is the build information in
// Go programs, so it lists exactly the modules that the linker has put into them.
//
//	sbom -name NAME -namespace URL PROGRAM...
//
// The time in the document is SOURCE_DATE_EPOCH, so the same programs give the same document.
package main

import (
	"cmp"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"time"

	"github.com/spdx/tools-golang/json"
	"github.com/spdx/tools-golang/spdx/v2/common"
	spdx "github.com/spdx/tools-golang/spdx/v2/v2_3"
)

func main() {
	name := flag.String("name", "capstan", "name of the document")
	namespace := flag.String("namespace", "", "URI of the document; it must be unique for each release")
	flag.Parse()
	if err := run(os.Stdout, *name, *namespace, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "sbom:", err)
		os.Exit(1)
	}
}

func run(out io.Writer, name, namespace string, programs []string) error {
	if namespace == "" || len(programs) == 0 {
		return errors.New("wanted -namespace URI and at least one program")
	}
	created, err := sourceDate()
	if err != nil {
		return err
	}
	doc := &spdx.Document{
		SPDXVersion: spdx.Version, DataLicense: spdx.DataLicense, SPDXIdentifier: "DOCUMENT",
		DocumentName: name, DocumentNamespace: namespace,
		CreationInfo: &spdx.CreationInfo{
			Created:  created.Format(time.RFC3339),
			Creators: []common.Creator{{CreatorType: "Tool", Creator: "capstan-sbom"}},
		},
	}
	modules := map[common.ElementID]*spdx.Package{}
	for _, program := range programs {
		if err := add(doc, modules, program); err != nil {
			return fmt.Errorf("%s: %w", program, err)
		}
	}
	for _, p := range modules {
		doc.Packages = append(doc.Packages, p)
	}
	slices.SortFunc(doc.Packages, func(a, b *spdx.Package) int {
		return cmp.Compare(a.PackageSPDXIdentifier, b.PackageSPDXIdentifier)
	})
	return json.Write(doc, out, json.Indent("  "))
}

func sourceDate() (time.Time, error) {
	seconds, err := strconv.ParseInt(cmp.Or(os.Getenv("SOURCE_DATE_EPOCH"), "0"), 10, 64)
	if err != nil {
		return time.Time{}, fmt.Errorf("wanted seconds since 1970 in SOURCE_DATE_EPOCH: %w", err)
	}
	return time.Unix(seconds, 0).UTC(), nil
}

// add adds a program, the modules in it, and the Go standard library to the document.
func add(doc *spdx.Document, modules map[common.ElementID]*spdx.Package, path string) error {
	info, err := buildinfo.ReadFile(path)
	if err != nil {
		return err
	}
	sum, err := checksum(path)
	if err != nil {
		return err
	}
	program := &spdx.Package{
		PackageName: filepath.Base(path), PackageSPDXIdentifier: common.ElementID("Program-" + hex.EncodeToString(sum[:8]) + "-" + filepath.Base(path)),
		PackageDownloadLocation: "NOASSERTION", PackageLicenseConcluded: "NOASSERTION", PackageLicenseDeclared: "NOASSERTION", PackageCopyrightText: "NOASSERTION",
		PrimaryPackagePurpose: "APPLICATION",
		PackageChecksums:      []common.Checksum{{Algorithm: common.SHA256, Value: hex.EncodeToString(sum)}},
	}
	doc.Packages = append(doc.Packages, program)
	relate(doc, "DOCUMENT", common.TypeRelationshipDescribe, program.PackageSPDXIdentifier)
	parts := []*debug.Module{{Path: "stdlib", Version: info.GoVersion}, &info.Main}
	for _, m := range append(parts, info.Deps...) {
		if m.Replace != nil {
			m = m.Replace
		}
		p := module(m)
		modules[p.PackageSPDXIdentifier] = p
		relate(doc, program.PackageSPDXIdentifier, common.TypeRelationshipContains, p.PackageSPDXIdentifier)
	}
	return nil
}

// module describes a Go module. Identifiers have a limited alphabet, so the identifier is a hash of path and version.
func module(m *debug.Module) *spdx.Package {
	id := sha256.Sum256([]byte(m.Path + "@" + m.Version))
	return &spdx.Package{
		PackageName: m.Path, PackageVersion: m.Version, PackageSPDXIdentifier: common.ElementID("Module-" + hex.EncodeToString(id[:8])),
		PackageDownloadLocation: "NOASSERTION", PackageLicenseConcluded: "NOASSERTION", PackageLicenseDeclared: "NOASSERTION", PackageCopyrightText: "NOASSERTION",
		PackageExternalReferences: []*spdx.PackageExternalReference{{
			Category: common.CategoryPackageManager, RefType: common.TypePackageManagerPURL,
			Locator: "pkg:golang/" + m.Path + "@" + m.Version,
		}},
	}
}

func relate(doc *spdx.Document, from common.ElementID, kind string, to common.ElementID) {
	doc.Relationships = append(doc.Relationships, &spdx.Relationship{
		RefA: common.DocElementID{ElementRefID: from}, RefB: common.DocElementID{ElementRefID: to}, Relationship: kind,
	})
}

func checksum(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	h := sha256.New()
	_, err = io.Copy(h, f)
	return h.Sum(nil), err
}
